"""Training. `tformer train` passes through these stages; each returns a `Training` of which more is known.

    request.find_training         the recipe of a new run, a resumed run or fine-tuning; checkpoint, teacher, folder
    prepare.prepare               data, tokenizer, device, number format; every `auto` of the recipe is resolved
    plan.plan                     of a training by time: the size of the model
    validations.plan_validations  the share of the held-out data that validations read

`session.run_training` calls them, and with the last value these:

    session.make_trainer          models with the weights of `weights.sources_of`, objective, batches, optimizer
    session.open_run              the run directory: the first thing that is written
    loop.Trainer.run              the steps; it reports to `reporter.RunReporter`: log, validate, sample, save
    session.summary               what `--json` prints

A step is `loop.Trainer.train_step`: a global batch in micro-batches, the objective's loss of each, backward, optimizer.
Several processes agree on each stage (`together`) and exchange gradients and counts (`parallel`).
"""
