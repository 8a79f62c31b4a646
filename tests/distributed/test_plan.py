"""The plan of a transformer: what it counts is what eight devices store and send."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import distributed as jqd
from jaxquant.distributed import __main__ as command_line
from jaxquant.distributed._plan import FORMATS, PRESETS, ModelSizes, make_decoding_step, make_plan, make_training_step

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"
SMALL = ModelSizes(layers=3, width=64, heads=8, kv_heads=4, hidden=160, vocabulary=96)
AXES = {"data": 2, "model": 4}


def sum_by_kind(collectives: list[jqd.Collective]) -> dict[str, int]:
    return {
        kind: sum(c.sent_bytes for c in collectives if c.kind == kind) for kind in sorted({c.kind for c in collectives})
    }


@pytest.mark.parametrize(
    ("name", "is_training"),
    [
        # Compiling them takes up to a minute.
        pytest.param("float32", True, marks=pytest.mark.full),
        pytest.param("int8", True, marks=pytest.mark.full),
        pytest.param("int8", False, marks=pytest.mark.slow),
    ],
)
def test_counts_are_those_of_eight_devices(name: str, is_training: bool) -> None:
    """The bytes that the compiled step sends, and the bytes of arrays that devices hold."""
    form, mesh = FORMATS[name], Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    plan = make_plan(SMALL, form, AXES, batch=4, sequence=16, is_training=is_training)
    make_step = make_training_step if is_training else make_decoding_step
    step = make_step(SMALL, form, 4, 16)
    arguments = [place(tree, specs, mesh) for tree, specs in zip(step.arguments, step.in_specs, strict=True)]
    for stored, i in step.stored.items():
        held = [shard.data.nbytes for leaf in jax.tree.leaves(arguments[i]) for shard in leaf.addressable_shards[:1]]
        assert plan.stored[stored] == sum(held)
    compiled = jax.jit(step.map_over(mesh)).lower(*arguments).compile()
    sent = sum_by_kind(jqd.count_traffic(compiled))
    # XLA may keep the last matrix for the backward pass, which follows at once, instead of gathering it again.
    elements = SMALL.width * SMALL.vocabulary // (AXES["data"] * AXES["model"])
    # As codes it travels with a scale for each of its rows, which `data` cuts.
    last = 4 * elements if form.weights is None else elements + 4 * SMALL.width // AXES["data"]
    assert plan.sent["all-gather"] - sent["all-gather"] in ({0, last} if is_training else {0})
    assert {**sent, "all-gather": 0} == {**{kind: n for kind, n in plan.sent.items() if n}, "all-gather": 0}
    results = compiled(*arguments)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(results[0]))
    if is_training:
        kept = SMALL.layers * 2 * 16 * SMALL.width * np.dtype(form.dtype).itemsize
        assert kept <= plan.stored["saved activations"] <= 1.1 * kept


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Return arrays of small numbers, spread over the mesh."""

    def put(spec: PartitionSpec, node: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.device_put(jnp.ones(leaf.shape, leaf.dtype), sharding), node)

    return jax.tree.map(put, specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("preset", "data", "model"), [("7B", 8, 1), ("70B", 8, 8), ("400B", 64, 8)])
def test_plans_of_large_meshes(preset: str, data: int, model: int) -> None:
    """They need no devices; codes take the part of the bytes that their widths say."""
    mesh = {"data": data, "model": model}
    plans = {
        (name, step): make_plan(PRESETS[preset], form, mesh, batch=512, sequence=2048, is_training=step == "train")
        for name, form in FORMATS.items()
        for step in ("train", "decode")
    }

    def compare(step: str, part: str, narrow: str, wide: str) -> float:
        return plans[narrow, step].stored[part] / plans[wide, step].stored[part]

    sent = {key: sum(plan.sent.values()) for key, plan in plans.items()}
    assert sent["int8", "train"] <= 0.28 * sent["float32", "train"]
    assert sent["int4", "train"] < sent["int8", "train"] < 0.56 * sent["bfloat16", "train"]
    assert compare("train", "optimizer state", "int8", "float32") <= 0.27
    assert compare("decode", "KV cache", "int8", "float32") <= 0.27
    assert compare("decode", "KV cache", "int4", "float32") <= 0.15
    assert compare("decode", "weights", "int4", "float32") < 0.2
    parameters = plans["float32", "train"].stored["weights"] / 4 * data * model
    assert abs(parameters / (float(preset[:-1]) * 1e9) - 1) < 0.05


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 2 --width 64 --heads 8 --vocabulary 64 --batch 8 --sequence 32 --formats int8"
    assert command_line.main(["plan", *options.split(), "--mesh", "data=2,model=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "8 devices (data=2, model=4), 8 x 32 tokens"
    assert [line.split("|")[1].strip() for line in lines[3:]] == [
        *("GB on each device", "-" * 18, "weights", "optimizer state", "saved activations"),
        *("sent by all-gather", "sent by all-reduce", "sent by all-to-all", "sent in a step"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train", "decode"])
def test_a_plan_as_json_is_a_layout(capsys: pytest.CaptureFixture[str], step: str) -> None:
    """Arrays that are placed on eight devices as the plan says take the bytes that it counts on each of them."""
    options = "--layers 2 --width 64 --heads 8 --kv-heads 4 --hidden 160 --vocabulary 96 --batch 8 --sequence 32"
    options += f" --mesh data=2,model=4 --mesh data=8 --formats float32,int8 --step {step} --json"
    assert command_line.main(["plan", *options.split()]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["mesh"] for plan in plans] == [{"data": 2, "model": 4}, {"data": 8, "model": 1}]
    assert plans[0]["sizes"]["hidden"] == 160
    for plan in plans:
        devices = np.array(jax.devices()[:8]).reshape(list(plan["mesh"].values()))
        mesh = Mesh(devices, tuple(plan["mesh"]))
        for values in plan["formats"].values():
            held = dict.fromkeys(("weights", "KV cache"), 0)
            for path, (shape, dtype, axes) in ((path, array.values()) for path, array in values["arrays"].items()):
                array = jax.device_put(np.zeros(shape, dtype), NamedSharding(mesh, PartitionSpec(*axes)))
                held[path.split("/")[0]] += array.addressable_shards[0].data.nbytes
            assert {name: count for name, count in held.items() if count} == {
                name: values["stored"][name] for name in held if name in values["stored"]
            }
            assert set(values) == {"stored", "sent", "arrays"}


def list_commands() -> list[Any]:
    """Return the commands that the documentation prints, and their outputs; those with many plans take a minute."""
    blocks = [part for part in DOCS.read_text().split("```text\n")[1:] if part.startswith("$ python")]
    texts = [text for block in blocks for text in block.split("```")[0].split("$ ")[1:]]
    pairs = [text.replace("\\\n", " ").split("\n", 1) for text in texts]
    return [
        pytest.param(
            command.split("jaxquant.distributed ")[1], output.strip(),
            marks=pytest.mark.full if output.count("\n") > 15 else pytest.mark.slow,
        )
        for command, output in pairs
    ]  # fmt: skip


@pytest.mark.parametrize(("command", "output"), list_commands())
def test_the_tables_of_the_documentation(capsys: pytest.CaptureFixture[str], command: str, output: str) -> None:
    assert command_line.main(command.split()) == 0
    assert capsys.readouterr().out.strip() == output


@pytest.mark.slow
def test_the_command_compares_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """The totals of two presets on two meshes equal the single plans."""
    options = "--batch 8 --sequence 32 --formats float32,int8 --step decode"
    meshes = ("model=8", "data=2,model=4")
    repeated = [part for mesh in meshes for part in ("--mesh", mesh)]
    assert command_line.main(["plan", *options.split(), "--preset", "7B,70B", *repeated]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode: 8 x 32 tokens"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows[0] == ["sizes", "devices", "GB on each device", "float32", "int8"]
    assert [row[:3] for row in rows[2:]] == [
        [preset, f"8 ({text})", what]
        for preset in ("7B", "70B")
        for text in ("data=1, model=8", "data=2, model=4")
        for what in ("stored", "sent in a step")
    ]
    plan = make_plan(PRESETS["70B"], FORMATS["int8"], {"data": 2, "model": 4}, batch=8, sequence=32, is_training=False)
    assert [row[4] for row in rows[-2:]] == [f"{sum(part.values()) / 1e9:.3f}" for part in (plan.stored, plan.sent)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--batch 8", "sizes: expected --preset, or --layers, --width and --heads, got neither"),
        ("--width 64 --heads 8", "sizes: expected --preset, or --layers, --width and --heads, got only --width and --"),
        ("--preset 7B --mesh data=3", "width: expected a multiple of 96, got 4096"),
        ("--preset 70B --mesh model=16", "kv_heads: expected a multiple of 16, got 8"),
        ("--preset 7B --formats int2", "formats: expected formats among float32, bfloat16, int8, int4, got 'int2'"),
        ("--preset 7B --formats int8,", "formats: expected formats among float32, bfloat16, int8, int4, got ''"),
        ("--preset 7B --formats int8,int4,int8", "formats: expected distinct formats, got int8,int4,int8"),
        ("--preset 7B --batch 4", "batch: expected a multiple of 8, the axis data, got 4"),
        ("--preset 7B --mesh data=8 --mesh data=8,model=1", "mesh: expected distinct meshes, got data=8, model=1 and"),
        ("--preset 7B --layers 0", "layers: expected a positive int, got 0"),
        ("--preset 7B --heads=-8", "heads: expected a positive int, got -8"),
        ("--preset 7B --kv-heads 0", "kv_heads: expected a positive int, got 0"),
        ("--preset 7B --sequence 0", "sequence: expected a positive int, got 0"),
    ],
)
def test_errors_of_the_command(capsys: pytest.CaptureFixture[str], options: str, text: str) -> None:
    assert command_line.main(["plan", *options.split()]) == 1
    assert f"jaxquant.distributed.plan: {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--mesh data=8,data=4", "--mesh: expected each axis once, got data twice in 'data=8,data=4'"),
        ("--mesh data=0", "--mesh: expected data=N,model=N with positive N, got 'data=0'"),
        ("--mesh data=-8", "--mesh: expected data=N,model=N with positive N, got 'data=-8'"),
        ("--mesh data", "--mesh: expected data=N,model=N with positive N, got 'data'"),
        ("--mesh pipe=8", "--mesh: expected data=N,model=N with positive N, got 'pipe=8'"),
        ("--preset 13B", "--preset: expected presets among 7B, 70B, 400B, got '13B'"),
        ("--preset 7B,7B", "--preset: expected distinct presets, got '7B,7B'"),
        ("--preset 7B --preset 70B", "--preset: expected it once, got it again with ['70B']"),
        ("--preset 7B --batch 8 --batch 16", "--batch: expected it once, got it again with 16"),
        ("--preset 7B --step train --step decode", "--step: expected it once, got it again with 'decode'"),
        ("--preset 7B --layers 2.5", "--layers: invalid int value: '2.5'"),
        ("--preset 7B --step serve", "--step: invalid choice: 'serve'"),
        ("--preset 7B --head-dim 64", "unrecognized arguments: --head-dim 64"),
    ],
)
def test_errors_of_the_parser(capsys: pytest.CaptureFixture[str], options: str, text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["plan", *options.split()])
    assert text in capsys.readouterr().err


# Texts of XLA that this machine's compiler does not print.


def test_forms_of_groups_and_of_asynchronous_operations() -> None:
    text = """
HloModule jit_f, num_partitions=8
%body (p: s32[]) -> s32[] {
  %ag = (s8[2,8]{1,0}, s8[16,8]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %ar = (f32[4]{0}, bf16[6]{0}) all-reduce(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %rs = f32[4]{0} reduce-scatter(%a), replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}, to_apply=%add
  %cp = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %aa = (s4[16]{0}, s4[16]{0}) all-to-all(%c, %d), replica_groups={}
  ROOT %w = f32[4]{0} while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    assert [(c.kind, c.dtype, c.shape, c.devices, c.calls, c.sent_bytes) for c in jqd.count_traffic(text)] == [
        ("all-reduce", "f32", (4,), 2, 1, 16),
        ("all-reduce", "bf16", (6,), 2, 1, 12),
        ("reduce-scatter", "f32", (4,), 4, 1, 48),
        ("collective-permute", "f32", (4,), 2, 1, 16),
        ("all-to-all", "s4", (16,), 8, 1, 7),
        ("all-to-all", "s4", (16,), 8, 1, 7),
        ("all-gather", "s8", (16, 8), 8, 5, 5 * 112),
    ]
    conditional = """
HloModule jit_g, num_partitions=4
%yes (p: f32[4]) -> f32[4] {
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
%no (p: f32[4]) -> f32[4] {
  ROOT %cp = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}
%ask (t: (f32[4])) -> pred[] {
  %ar = pred[] all-reduce(%q), replica_groups={}, to_apply=%or
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %c = f32[4]{0} conditional(%a, %p, %p), true_computation=%yes, false_computation=%no
  %d = f32[4]{0} conditional(%i, %p, %p), branch_computations={%yes, %no}
  ROOT %w = (f32[4]{0}) while(%t), condition=%ask, body=%no, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    assert [(c.kind, c.calls) for c in jqd.count_traffic(conditional)] == [
        *[("all-reduce", 1), ("collective-permute", 1)] * 2,
        ("all-reduce", 6),
        ("collective-permute", 5),
    ]
    with pytest.raises(TypeError, match=r"count_traffic: compiled: expected a compiled program or its text, got 3"):
        jqd.count_traffic(3)
