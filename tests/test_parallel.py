"""Tensor parallel over gloo: as many processes as ranks, the same tokens as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hal_models.commands.loading import SHIPPED

HERE = Path(__file__).parent


def run(world: int, folder: Path, way: str, store: Path) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank."""
    command = [sys.executable, str(HERE / "ranks.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store), str(folder), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    return [(rank.returncode, out, error) for rank, (out, error) in zip(ranks, outputs, strict=True)]


def tokens(world: int, folder: Path, way: str, store: Path) -> list[list[int]]:
    found = run(world, folder, way, store)
    assert all(status == 0 for status, _, _ in found), found
    answers = [json.loads(out.splitlines()[-1]) for _, out, _ in found]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_two_ranks_of_the_tiny_checkpoints(name: str, tmp_path: Path) -> None:
    alone = tokens(1, SHIPPED / name, "text", tmp_path / "one")
    assert tokens(2, SHIPPED / name, "text", tmp_path / "two") == alone


@pytest.mark.oracle
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_four_ranks_of_random_checkpoints(moe: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import oracle

    # two KV heads over four ranks: each is held twice
    folder = oracle.random_checkpoint(
        tmp_path / "random", key_heads=4, value_heads=8, heads=8, kv_heads=2, moe=moe, seed=3
    )
    alone = tokens(1, folder, "numbers", tmp_path / "one")
    assert tokens(4, folder, "numbers", tmp_path / "four") == alone


def test_ranks_that_choose_differently_stop(tmp_path: Path) -> None:
    found = run(2, SHIPPED / "dense", "differ", tmp_path / "store")
    for status, out, error in found:
        assert status != 0
        assert not out.strip()
        assert "ranks chose differently" in error
        assert "torch.packed" in error
        assert "torch.separate" in error
