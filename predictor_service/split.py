"""Which programs are trained on and which tested on: decided for each group of the same task, never for a row."""

from collections.abc import Iterable
from hashlib import blake2b

from predictor_service.examples import ProgramExample

TEST_SHARE = 0.3


def in_test(split_group: str, seed: int, test_share: float = TEST_SHARE) -> bool:
    """Whether a group is tested on. Nothing else is asked: it is the same whatever files are read, in any order."""
    digest = blake2b(f"{seed}/{split_group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < test_share * 2**64


def split(
    programs: Iterable[ProgramExample], seed: int, test_share: float = TEST_SHARE
) -> tuple[list[ProgramExample], list[ProgramExample]]:
    """Those to train on and those to test on, in their order. The share is met in the mean, by groups."""
    sides: tuple[list[ProgramExample], list[ProgramExample]] = ([], [])
    for program in programs:
        sides[in_test(program.split_group, seed, test_share)].append(program)
    return sides
