"""Every work that can be benched, by name."""

from __future__ import annotations

from tformer.bench.task import Work
from tformer.bench.work_classify import CLASSIFY
from tformer.bench.work_generate import GENERATE
from tformer.bench.work_tokenize import TOKENIZE
from tformer.bench.work_train import TRAIN
from tformer.bench.work_translate import TRANSLATE

WORKS: dict[str, Work] = {work.name: work for work in (TRAIN, GENERATE, TRANSLATE, CLASSIFY, TOKENIZE)}
