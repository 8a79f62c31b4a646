"""PEFT's files of adapters: read, written, refused if damaged; beside the package where it is installed."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.checkpoint import CheckpointError
from tests.cases.adapted_programs import PROGRAMS
from tests.support.equality import check_equal

safetensors = pytest.importorskip("safetensors.numpy")
SETTINGS = jq.lora.LoRA(4, alpha=8)
RULES = jq.recipes.weight_only_int8()


def network(params: Any, tokens: jax.Array) -> jax.Array:
    """Return an embedding, a stack of two layers and a head, with weights as torch has them."""
    h = params["emb.weight"][tokens]
    h = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w.T), None), h, params["layers"])[0]
    return h @ params["head.weight"].T


def name_module(path: str) -> str:
    return "layers.{}" if path == "layers" else path.removesuffix(".weight")


def sample(rng: np.random.Generator) -> tuple[dict[str, jax.Array], jax.Array]:
    shapes = {"emb.weight": (24, 16), "layers": (2, 16, 16), "head.weight": (8, 16)}
    params = {name: jnp.asarray(rng.normal(0, 0.4, shape).astype(np.float32)) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.integers(0, 24, (2, 5)).astype(np.int32))


def adapt(rng: np.random.Generator, settings: Any = SETTINGS) -> tuple[Any, jq.lora.AdaptedTree, jax.Array]:
    params, tokens = sample(rng)
    prepared = jq.prepare(network, params, tokens, rules=RULES)
    adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
    moved = jax.tree.map(lambda v: v + jnp.asarray(rng.normal(0, 0.1, v.shape).astype(np.float32)), adapted.adapters)
    return prepared, adapted.replace(adapters=moved), tokens


def read(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    tensors = safetensors.load_file(folder / "adapter_model.safetensors")
    return tensors, json.loads((folder / "adapter_config.json").read_text())


def test_a_file_has_the_names_and_shapes_of_peft(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    settings = (jq.lora.LoRA(3, "layers", alpha=6, variant="lora"), jq.lora.LoRA(4, alpha=8))
    prepared, adapted, tokens = adapt(rng, settings)
    jq.lora.save_peft(tmp_path, prepared, adapted, names=name_module, base_model="some/model")
    tensors, config = read(tmp_path)
    prefix = "base_model.model."
    assert {name: x.shape for name, x in tensors.items()} == {
        f"{prefix}emb.lora_embedding_A": (4, 24), f"{prefix}emb.lora_embedding_B": (16, 4),
        f"{prefix}layers.0.lora_A.weight": (3, 16), f"{prefix}layers.0.lora_B.weight": (16, 3),
        f"{prefix}layers.1.lora_A.weight": (3, 16), f"{prefix}layers.1.lora_B.weight": (16, 3),
        f"{prefix}head.lora_A.weight": (4, 16), f"{prefix}head.lora_B.weight": (8, 4),
    }  # fmt: skip
    assert config["target_modules"] == ["emb", "head", "layers.0", "layers.1"]
    # The settings of most modules, and patterns for the others.
    ranks = {name: config["rank_pattern"].get(name, config["r"]) for name in config["target_modules"]}
    alphas = {name: config["alpha_pattern"].get(name, config["lora_alpha"]) for name in config["target_modules"]}
    assert ranks == {"emb": 4, "head": 4, "layers.0": 3, "layers.1": 3}
    assert alphas == {"emb": 8, "head": 8, "layers.0": 6, "layers.1": 6}
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "some/model")
    # What the file means, in numpy.
    floats = {path: np.asarray(q.dequantize(), np.float64) for path, q in adapted.frozen.params.items()}
    layers = [
        floats["layers"][i] + 2 * (tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"])
        for i, name in enumerate((f"{prefix}layers.0", f"{prefix}layers.1"))
    ]
    table = (
        floats["emb.weight"]
        + 2 * (tensors[f"{prefix}emb.lora_embedding_B"] @ tensors[f"{prefix}emb.lora_embedding_A"]).T
    )
    h = table[np.asarray(tokens)]
    for w in layers:
        h = np.maximum(h @ w.T, 0)
    head = floats["head.weight"] + 2 * tensors[f"{prefix}head.lora_B.weight"] @ tensors[f"{prefix}head.lora_A.weight"]
    expected = h @ head.T
    np.testing.assert_allclose(prepared.apply(adapted, tokens), expected, atol=1e-5 * np.abs(expected).max())
    loaded = jq.lora.load_peft(tmp_path, prepared, adapted.frozen, names=name_module)
    jax.tree.map(check_equal, loaded.adapters, dict(adapted.adapters))
    assert {path: (x.rank, x.scaling) for path, x in loaded.settings} == {
        "emb.weight": (4, 2), "layers": (3, 2), "head.weight": (4, 2)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dense", "heads", "scan", "ragged", "experts"])
@pytest.mark.parametrize("variant", ["lora", "dora", "qa"])
def test_round_trip(name: str, variant: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    if name == "ragged" and variant == "dora":
        pytest.skip("ragged products take no DoRA")
    params, x = PROGRAMS[name].sample(rng)
    prepared = jq.prepare(PROGRAMS[name].function, params, x, rules=jq.recipes.weight_only_int4(block=4))
    settings = jq.lora.LoRA(3, dropout=0.25, variant=variant, rank_stabilized=True)
    adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0), params=params)
    names = lambda path: f"{path}.{{}}" if name in ("scan", "ragged", "experts") else path  # noqa: E731
    jq.lora.save_peft(tmp_path / "new" / "folder", prepared, adapted, names=names)
    loaded = jq.lora.load_peft(tmp_path / "new" / "folder", prepared, adapted.frozen, names=names)
    ((_, lora), *_) = loaded.settings
    assert (lora.dropout, lora.rank_stabilized) == (0.25, True)
    y, expected = (jax.jit(prepared.apply)(tree, x) for tree in (loaded, adapted))
    check_equal(y, expected)
    if variant != "qa":
        jax.tree.map(check_equal, loaded.adapters, dict(adapted.adapters))


def test_what_a_file_cannot_hold_is_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    for name, text in (("tied", r"one of table \(dot_general and take\)"), ("convolution", "one of window")):
        params, x = PROGRAMS[name].sample(rng)
        prepared = jq.prepare(PROGRAMS[name].function, params, x, rules=RULES)
        adapted = jq.lora.adapt(prepared, prepared.convert(params), jq.lora.LoRA(2), jax.random.key(0))
        with pytest.raises(ValueError, match=rf"lora\.save_peft: adapted: expected adapters of products.*{text}"):
            jq.lora.save_peft(tmp_path, prepared, adapted)
    prepared, adapted, _ = adapt(rng, [jq.lora.LoRA(2, "emb*"), jq.lora.LoRA(2, rank_stabilized=True)])
    with pytest.raises(ValueError, match="expected adapters with one variant, dropout and rule of scaling"):
        jq.lora.save_peft(tmp_path, prepared, adapted, names=name_module)
    prepared, adapted, _ = adapt(rng)
    with pytest.raises(ValueError, match=r'names: expected a name with "\{\}" for the number of the layer'):
        jq.lora.save_peft(tmp_path, prepared, adapted)
    with pytest.raises(ValueError, match=r"names: expected a name of its own for each parameter, got same\.0"):
        jq.lora.save_peft(tmp_path, prepared, adapted, names=lambda path: "same.{}" if path == "layers" else "same.0")
    assert not list(tmp_path.iterdir())


def test_the_patterns_of_a_file_mean_one_module_each(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """PEFT searches for a pattern at the end of names, so that "head" would mean "a.head", too."""
    params = {"a": {"head": jnp.ones((8, 8))}, "b(": jnp.ones((8, 8)), "head": jnp.ones((8, 4))}
    x = jnp.asarray(rng.normal(0, 1, (3, 8)).astype(np.float32))
    prepared = jq.prepare(lambda p, x: x @ p["a"]["head"] @ p["b("] @ p["head"], params, x, rules=RULES)
    rank: Any = np.int64(2)
    settings = [jq.lora.LoRA(rank, "a/*", alpha=8), jq.lora.LoRA(3, "head", alpha=2), jq.lora.LoRA(4)]
    adapted = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
    jq.lora.save_peft(tmp_path, prepared, adapted)
    loaded = jq.lora.load_peft(tmp_path, prepared, adapted.frozen)
    found = {path: (lora.rank, lora.alpha) for path, lora in loaded.settings}
    assert found == {"a/head": (2, 8), "b(": (4, 4), "head": (3, 2)}
    _, config = read(tmp_path)
    assert config["alpha_pattern"] == {"^head": 2, r"^b\(": 4}
    # The function get_pattern_key of PEFT 0.21.
    matches = {
        m: [k for k in config["alpha_pattern"] if re.match(rf"(.*\.)?({k})$", m)] for m in ("a.head", "head", "b(")
    }
    assert matches == {"a.head": [], "head": ["^head"], "b(": [r"^b\("]}


def test_nothing_is_written_of_bad_arguments(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(rng)

    def refuse(error: Any, text: str, tree: Any = adapted, **arguments: Any) -> None:
        with pytest.raises(error, match=rf"jaxquant\.lora\.save_peft: {text}"):
            jq.lora.save_peft(tmp_path, prepared, tree, **{"names": name_module, **arguments})

    refuse(TypeError, "base_model: expected the name of a model, as text", base_model=pathlib.Path("a"))
    refuse(TypeError, "names: expected a function from the path", names={"layers": "layers.{}"})
    refuse(
        ValueError, "adapters: expected the paths that the tree was made with, got none", adapted.replace(adapters={})
    )
    turned = {path: {**parts, "b": parts["b"].mT} for path, parts in adapted.adapters.items()}
    refuse(ValueError, r"adapters\['layers'\]: expected arrays of the shapes", adapted.replace(adapters=turned))
    codes = jax.tree.map(lambda part: part.astype(jnp.int32), dict(adapted.adapters))
    refuse(TypeError, r"adapters\['layers'\]: expected arrays of floats", adapted.replace(adapters=codes))
    assert not list(tmp_path.iterdir())


def spoil_config(folder: pathlib.Path, **changes: Any) -> None:
    _, config = read(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))


def spoil_tensors(folder: pathlib.Path, name: str, value: np.ndarray | None) -> None:
    tensors, _ = read(folder)
    full = f"base_model.model.{name}"
    tensors = {key: x for key, x in tensors.items() if key != full}
    safetensors.save_file(tensors if value is None else {**tensors, full: value}, folder / "adapter_model.safetensors")


def cut_file(folder: pathlib.Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


DAMAGES = {
    "no LoRA": (lambda f: spoil_config(f, peft_type="IA3"), 'expected peft_type "LORA", got IA3'),
    "biases": (lambda f: spoil_config(f, bias="all"), 'expected bias "none"'),
    "modules": (lambda f: spoil_config(f, modules_to_save=["head"]), "expected modules_to_save null"),
    "weights of the model": (
        lambda f: spoil_config(f, init_lora_weights="pissa"), 'init_lora_weights true or .* got \'pissa\''
    ),
    "not a number": (lambda f: spoil_config(f, lora_alpha=float("nan")), "alpha: expected a number other than 0"),
    "rank": (lambda f: spoil_config(f, r="four"), "expected a number, a bool or an object at r, got 'four'"),
    "no rank": (
        lambda f: spoil_config(f, r=0), r"^adapter_config.json, for .*: .*load_peft: rank: expected a positive int"
    ),
    "a bool": (lambda f: spoil_config(f, r=True), "at r, got True"),
    "other rank": (lambda f: spoil_config(f, r=5), r"0.lora_A.weight: expected float32.* of shape \(5, 16\)"),
    "pattern": (lambda f: spoil_config(f, rank_pattern={"(": 3}), "expected regular expressions as keys"),
    "numbers": (lambda f: spoil_config(f, alpha_pattern={"emb": "x"}), "expected numbers in alpha_pattern"),
    "layers": (lambda f: spoil_config(f, rank_pattern={"layers.1": 3}), "one rank and alpha in the stack of layers"),
    "DoRA": (lambda f: spoil_config(f, use_dora=True), r"a tensor .*\.layers\.0\.lora_magnitude_vector"),
    "no object": (lambda f: (f / "adapter_config.json").write_text("[1]"), "expected an object, got list"),
    "cut config": (lambda f: cut_file(f, "adapter_config.json"), "expected a JSON file, got"),
    "cut tensors": (lambda f: cut_file(f, "adapter_model.safetensors"), "expected a safetensors file"),
    "missing": (lambda f: spoil_tensors(f, "head.lora_B.weight", None), "expected a tensor base_model.model.head.l"),
    "shape": (
        lambda f: spoil_tensors(f, "head.lora_B.weight", np.ones((4, 8), np.float32)),
        r"shape \(8, 4\), got float32 \(4"
    ),
    "dtype": (lambda f: spoil_tensors(f, "head.lora_B.weight", np.ones((8, 4), np.int8)), "got int8"),
    "not finite": (
        lambda f: spoil_tensors(f, "head.lora_B.weight", np.full((8, 4), np.nan, np.float32)),
        r"head\.lora_B\.weight: expected finite numbers, got a NaN or an infinity"
    ),
    "unknown": (
        lambda f: spoil_tensors(f, "tail.lora_B.weight", np.ones((8, 4), np.float32)),
        "expected tensors of parameters with codes, which names calls .*, head, emb, got base_model.model.tail.lora_B",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage: str, fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(fixed_rng)
    jq.lora.save_peft(tmp_path, prepared, adapted, names=name_module)
    spoil, text = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=text) as caught:
        jq.lora.load_peft(tmp_path, prepared, adapted.frozen, names=name_module)
    assert "load_" in str(caught.value)


def test_missing_files_are_named(fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    prepared, adapted, _ = adapt(fixed_rng)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        jq.lora.save_peft(tmp_path, prepared, adapted, names=name_module)
        (tmp_path / name).unlink()
        text = rf"{re.escape(name)}: expected a file that can be read, got No such file or directory"
        with pytest.raises(CheckpointError, match=text):
            jq.lora.load_peft(tmp_path, prepared, adapted.frozen, names=name_module)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/new: expected a folder that can be made .*, got File exists"):
        jq.lora.save_peft(tmp_path / "file" / "new", prepared, adapted, names=name_module)


@pytest.mark.parametrize("dora", [False, True])
def test_the_package_peft_reads_and_writes_the_same(
    dora: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")

    class Network(torch.nn.Module):
        def __init__(self, floats: dict[str, np.ndarray]) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(24, 16)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16, bias=False) for _ in range(2)])
            self.head = torch.nn.Linear(16, 8, bias=False)
            with torch.no_grad():
                self.emb.weight.copy_(torch.tensor(floats["emb.weight"]))
                self.head.weight.copy_(torch.tensor(floats["head.weight"]))
                for layer, w in zip(self.layers, floats["layers"], strict=True):
                    layer.weight.copy_(torch.tensor(w))

        def forward(self, tokens: Any) -> Any:
            h = self.emb(tokens)
            for layer in self.layers:
                h = torch.relu(layer(h))
            return self.head(h)

    settings = jq.lora.LoRA(4, "layers" if dora else None, alpha=8, variant="dora" if dora else "lora")
    prepared, adapted, tokens = adapt(rng, settings)
    jq.lora.save_peft(tmp_path / "ours", prepared, adapted, names=name_module)
    network = Network({path: np.array(q.dequantize()) for path, q in adapted.frozen.params.items()})
    model = peft.PeftModel.from_pretrained(network, tmp_path / "ours", is_trainable=True)
    with torch.no_grad():
        expected = model(torch.tensor(np.array(tokens))).numpy()
    y = np.asarray(prepared.apply(adapted, tokens))
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())
    # And back: PEFT's own file, after a change.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.tensor(rng.normal(size=parameter.shape), dtype=torch.float32)
        expected = model(torch.tensor(np.array(tokens))).numpy()
    model.save_pretrained(tmp_path / "theirs")
    loaded = jq.lora.load_peft(tmp_path / "theirs", prepared, adapted.frozen, names=name_module)
    assert [lora.variant for _, lora in loaded.settings] == [settings.variant] * len(loaded.settings)
    changed = np.asarray(prepared.apply(loaded, tokens))
    np.testing.assert_allclose(changed, expected, atol=2e-5 * np.abs(expected).max())
    assert np.abs(changed - y).max() > 1e-3 * np.abs(y).max()
