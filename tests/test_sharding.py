"""Every part of every rank holds exactly its rows and columns: each number of the file is unlike all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tensors, config, model, parts, per_expert, save, tensors
from hal_models.qwen3_5.weights import load

from hal.errors import DivisionError

KEY, VALUE, HEADS, KV_HEADS, DIM = 16, 48, 8, 2, 8  # rows of q or k, of v or z; attention's heads
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"force": ["InProj=torch.packed"]},
    "separate": {"deny": ["InProj=torch.packed"]},
    "padded": {"force": ["InProj=torch.padded"]},
}
FORMS = {"dense": {}, "experts": {"num_experts": 4}}
WORLDS = (1, 2, 4, 8)
Cut = Callable[[int, int], torch.Tensor]


def share(tensor: torch.Tensor, rank: int, world: int, axis: int = 0) -> torch.Tensor:
    """A rank's equal share, in the order of ranks."""
    size = tensor.shape[axis] // world
    return tensor.narrow(axis, rank * size, size)


def expected(named: Tensors, rank: int, world: int) -> Tensors:
    """What a rank must hold, written down part by part from the layout of the published files."""

    def rows(name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return share(named[name][start:stop], rank, world)

    def columns(name: str) -> torch.Tensor:
        return share(named[name], rank, world, -1)

    linear, attention = "model.layers.0.linear_attn.", "model.layers.1.self_attn."
    qkv, conv = f"{linear}in_proj_qkv.weight", f"{linear}conv1d.weight"
    sections = {"q": (0, KEY), "k": (KEY, 2 * KEY), "v": (2 * KEY, 2 * KEY + VALUE)}
    found = {f"layers.0.linear_attn.in_proj.{n}": rows(qkv, *at) for n, at in sections.items()}
    found |= {f"layers.0.linear_attn.in_proj.{n}": rows(f"{linear}in_proj_{n}.weight") for n in "zba"}
    found |= {f"layers.0.linear_attn.core.conv_{n}": rows(conv, *at).flatten(1) for n, at in sections.items()}
    found |= {f"layers.0.linear_attn.core.{n}": rows(f"{linear}{n}") for n in ("A_log", "dt_bias")}
    found["layers.0.linear_attn.core.norm"] = named[f"{linear}norm.weight"]
    found["layers.0.linear_attn.out_proj.weight"] = columns(f"{linear}out_proj.weight")
    # rows of q per head: the query, then its gate; KV heads beyond the ranks are split, fewer are copied whole
    held = max(1, KV_HEADS // world)
    first = rank * KV_HEADS // world
    found["layers.1.self_attn.qkv_proj.q"] = rows(f"{attention}q_proj.weight")
    for n in "kv":
        found[f"layers.1.self_attn.qkv_proj.{n}"] = named[f"{attention}{n}_proj.weight"][
            first * DIM : (first + held) * DIM
        ]
        if n == "k":
            for norm in ("q_norm", "k_norm"):
                found[f"layers.1.self_attn.core.{norm}"] = named[f"{attention}{norm}.weight"]
    found["layers.1.self_attn.o_proj.weight"] = columns(f"{attention}o_proj.weight")
    for layer, opens in enumerate(("linear_attn.in_proj", "self_attn.qkv_proj")):
        name = f"model.layers.{layer}."
        found[f"layers.{layer}.{opens}.norm"] = named[f"{name}input_layernorm.weight"]
        found[f"layers.{layer}.mlp.norm"] = named[f"{name}post_attention_layernorm.weight"]
        found |= _feed_forward(named, f"{name}mlp.", f"layers.{layer}.mlp.", rank, world)
    found |= {"embed.weight": rows("model.embed_tokens.weight"), "head.weight": rows("lm_head.weight")}
    return found | {"head.norm": named["model.norm.weight"]}


def _feed_forward(named: Tensors, file: str, site: str, rank: int, world: int) -> Tensors:
    routed = f"{file}gate.weight" in named
    dense, prefix = (f"{file}shared_expert.", "shared_") if routed else (file, "")
    found = {f"{site}{prefix}{n}": share(named[f"{dense}{n}_proj.weight"], rank, world) for n in ("gate", "up")}
    found[f"{site}{prefix}down"] = share(named[f"{dense}down_proj.weight"], rank, world, 1)
    if routed:
        gate, up = named[f"{file}experts.gate_up_proj"].chunk(2, 1)
        found[f"{site}experts_gate_up"] = torch.cat([share(half, rank, world, 1) for half in (gate, up)], 1)
        found[f"{site}experts_down"] = share(named[f"{file}experts.down_proj"], rank, world, 2)
        found[f"{site}router"] = named[f"{file}gate.weight"]
        found[f"{site}shared_sigmoid"] = named[f"{file}shared_expert_gate.weight"]
    return found


@pytest.fixture(scope="module", params=[*FORMS, "experts one by one"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    cfg = config(**FORMS[request.param.removesuffix(" one by one")])
    named = tensors(cfg)
    written = per_expert(named) if request.param.endswith("one by one") else named
    return save(tmp_path_factory.mktemp("sharded"), cfg, written), named


def ranks(folder: Path, world: int, **policy: Any) -> list[Tensors]:
    found = []
    for rank in range(world):
        built = model(folder, rank, world, **policy)
        load(built, folder)
        found.append(parts(built))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_holds_its_rows(checkpoint: tuple[Path, Tensors], world: int) -> None:
    folder, named = checkpoint
    for rank, got in enumerate(ranks(folder, world)):
        wanted = expected(named, rank, world)
        assert got.keys() == wanted.keys()
        wrong = [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_together_hold_the_whole_in_every_layout(world: int, layout: str, tmp_path: Path) -> None:
    cfg = config()
    named = tensors(cfg)
    every = ranks(save(tmp_path, cfg, named), world, **LAYOUTS[layout])

    def joined(part: str) -> torch.Tensor:
        return torch.cat([each[f"layers.0.linear_attn.in_proj.{part}"] for each in every])

    file = "model.layers.0.linear_attn.in_proj_"
    assert torch.equal(torch.cat([joined(part) for part in "qkv"]), named[f"{file}qkv.weight"])
    for part in "zba":
        assert torch.equal(joined(part), named[f"{file}{part}.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_the_one_that_was_asked_for(layout: str, tmp_path: Path) -> None:
    cfg = config()
    built = model(save(tmp_path, cfg, tensors(cfg)), 0, 8, **LAYOUTS[layout])
    group = next(g for g in built.runtime.groups if g.name.endswith("in_proj"))
    for buffer in group.storages["weight"].buffers.values():
        buffer.fill_(float("nan"))
    load(built, tmp_path)
    assert str(group.layouts["weight"]).startswith(layout)
    if layout == "padded":
        whole, used = group.storages["weight"].buffers["packed"], 2 * (KEY + VALUE + 16) // 8
        assert whole.shape[0] == 128 > used
        assert not whole[used:].any()


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_than_kv_heads_keep_each_head_whole(world: int, tmp_path: Path) -> None:
    cfg = config()
    named = tensors(cfg)
    site, file = "layers.1.self_attn.qkv_proj.", "model.layers.1.self_attn."
    for rank, got in enumerate(ranks(save(tmp_path, cfg, named), world)):
        head = rank * KV_HEADS // world
        for part in "kv":
            whole = named[f"{file}{part}_proj.weight"].reshape(KV_HEADS, DIM, -1)
            assert torch.equal(got[f"{site}{part}"], whole[head])
        # the file's rows of q are [head, query or gate, dim]
        pairs = named[f"{file}q_proj.weight"].reshape(HEADS, 2, DIM, -1)
        mine = got[f"{site}q"].reshape(HEADS // world, 2, DIM, -1)
        assert torch.equal(mine, pairs[rank * HEADS // world : (rank + 1) * HEADS // world])
        # and those queries read exactly that KV head
        queries = range(rank * HEADS // world, (rank + 1) * HEADS // world)
        assert {query // (HEADS // KV_HEADS) for query in queries} == {head}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"linear_num_key_heads": 2}, "key heads: 2 over 4 ranks"),
        ({"num_attention_heads": 6}, "attention heads: 6 over 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, "KV heads: 6 over 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "KV heads: 3 over 4 ranks"),
        ({"vocab_size": 42}, "vocabulary: 42 over 4 ranks"),
        ({"intermediate_size": 30}, "intermediate: 30 over 4 ranks"),
        ({"num_experts": 4, "moe_intermediate_size": 6}, "expert intermediate: 6 over 4 ranks"),
        ({"num_experts": 4, "shared_expert_intermediate_size": 10}, "shared expert intermediate: 10 over 4 ranks"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_does_not_divide_names_the_count_and_the_ranks(changed: dict[str, Any], what: str, tmp_path: Path) -> None:
    cfg = config(**changed)
    save(tmp_path, cfg, {"unread": torch.zeros(1)})
    with pytest.raises(DivisionError, match=what):
        model(tmp_path, 0, 4)
