"""One set of embeddings for two models: ELECTRA's generator reads and writes with the discriminator's tables.

Only the discriminator sees every token of a batch, so its tables learn from all of them; the generator's masked LM
teaches them to tell tokens apart (arXiv 2003.10555, section 3.2).
"""

from __future__ import annotations

from torch import nn

from tformer.nn.embedding import TokenEmbedding
from tformer.nn.positions.learned import LearnedPositions


def tie_embeddings(follower: nn.Module, owner: nn.Module) -> dict[str, str]:
    """Make tables of `follower` the owner's: {name of a parameter in `follower`: its name in `owner`}.

    Token table (and with it whatever the follower has tied to it, such as its output), token types and learned
    positions, each where both have one of the same shape; what differs stays the follower's own. Call it after the
    models are on their device.
    """
    owned = _tables(owner)
    tied: dict[str, str] = {}
    for table, parameter in _tables(follower).items():
        if table not in owned or owned[table].shape != parameter.shape:
            continue
        name_there = _names(owner, owned[table])[0]
        for name in _names(follower, parameter):
            module, _, attribute = name.rpartition(".")
            setattr(follower.get_submodule(module), attribute, owned[table])
            tied[name] = name_there
    return tied


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """The input tables of an encoder or of a decoder alone, by what they are for."""
    tables: dict[str, nn.Parameter] = {}
    embedding = model.get_submodule("embedding")
    if isinstance(embedding, TokenEmbedding):
        tables["tokens"] = embedding.weight
        if embedding.token_types is not None:
            tables["token types"] = embedding.token_types
    for module in model.modules():
        if isinstance(module, LearnedPositions):
            tables.setdefault("positions", module.weight)
    return tables


def _names(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    return [name for name, found in model.named_parameters(remove_duplicate=False) if found is parameter]
