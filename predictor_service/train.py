"""A model is learnt from one side of the split, judged on the other, and kept with what was found."""

from collections.abc import Sequence
from dataclasses import asdict

from cluster.errors import ConfigError
from cluster.registry import PREDICTORS
from predictor_service.bundle import Origin, data_hash
from predictor_service.evaluate import scores
from predictor_service.examples import ProgramExample
from predictor_service.model_files import StoredModel
from predictor_service.split import split


def trained(name: str, programs: Sequence[ProgramExample], seed: int | None) -> StoredModel:
    """The model ``name`` with its metrics by source, of programs that it has not seen.

    Args:
        name: in the registry.
        programs: of both sides.
        seed: of the split; None: learnt from all programs, and so without metrics.

    Raises:
        ConfigError: no such model, or too little to learn from.
    """
    cls = PREDICTORS.load(name)
    train, test = (list(programs), []) if seed is None else split(programs, seed)
    if not train:
        raise ConfigError(f"--split-seed {seed}: of {len(programs)} programs it leaves nothing to train on")
    model = cls.fit(train)
    found = scores(name, model, test) if test else []
    metrics = {
        score.source: {k: v for k, v in asdict(score).items() if k not in ("model", "source")} for score in found
    }
    sources = tuple(sorted({program.source for program in train}))
    return StoredModel(name, model, Origin(data_hash(train), len(train), sources, seed, metrics))


def check_unseen(stored: StoredModel, seed: int) -> None:
    """Whether what is tested on with ``seed`` was kept from the model: groups are split by themselves, see `split`.

    Raises:
        ConfigError: it was not.
    """
    learnt = stored.origin.split_seed
    if learnt != seed:
        whence = "all programs" if learnt is None else f"the train side of --split-seed {learnt}"
        raise ConfigError(f"--bundle: the model {stored.name} was learnt from {whence}, but --split-seed is {seed}")
