"""Memory between the forward and the backward pass: `python -m benchmarks.residuals`.

The sizes are those of compiled programs. The first table shows the residuals of `jax.vjp` of a network for one batch
size, minus those for half of it, so that the parameters and their codes cancel out. "save_codes" is the network under
`jax.checkpoint(policy=jq.save_codes)`. The second table shows how much temporary memory one more layer adds to a
compiled gradient of a deep network, without checkpoints, or with one for each layer and its relu. The exit status is 1
if save_codes exceeds 0.3 of float32's bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxquant as jq
from jaxquant.flax import linen as qnn

from . import training

_LIMIT = 0.3
_DEEP = (1024, 512)
_SHAPES = {"mlp": (1024, 1024), "cnn": (16, 32, 32, 64)}


def _bytes(model: Any, variables: Any, shape: tuple[int, ...], policy: Any) -> int:
    """Return the bytes that one batch adds."""
    trained, state = training._split_variables(variables)

    def pull_back(trained: Any, x: jax.Array) -> Any:
        def apply(trained: Any, x: jax.Array) -> Any:
            return model.apply({**trained, **state}, x)

        run = apply if policy is None else jax.checkpoint(apply, policy=policy)
        return jax.vjp(run, trained, x)[1]

    sizes = []
    for images in (shape[0] // 2, shape[0]):
        x = jax.ShapeDtypeStruct((images, *shape[1:]), jnp.float32)
        analysis: Any = jax.jit(pull_back).lower(trained, x).compile().memory_analysis()
        sizes.append(analysis.output_size_in_bytes)
    return 2 * (sizes[1] - sizes[0])


class Block(nn.Module):
    """A dense layer and a relu."""

    specs: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(x.shape[-1]) if self.specs is None else qnn.Dense(x.shape[-1], **dict(self.specs))
        return nn.relu(dense(x))


class Deep(nn.Module):
    """A sequence of blocks, each under its own checkpoint if there is a policy."""

    depth: int
    specs: Any
    policy: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = Block if self.policy is None else nn.remat(Block, policy=self.policy)
        for _ in range(self.depth):
            x = block(self.specs)(x)
        return x


def _per_layer(specs: Any, policy: Any) -> float:
    """Return the MiB that one more layer adds to the temporary memory of a gradient."""
    sizes = []
    for depth in (4, 12):
        model = Deep(depth, None if specs is None else tuple(specs.items()), policy)
        x = jax.ShapeDtypeStruct((_DEEP[0], _DEEP[1]), jnp.float32)
        trained, state = training._split_variables(jax.eval_shape(model.init, jax.random.key(0), x))

        def loss(trained: Any, state: Any, x: jax.Array, model: nn.Module = model) -> jax.Array:
            return jnp.square(model.apply({**trained, **state}, x)).mean()  # type: ignore[arg-type]

        analysis: Any = jax.jit(jax.grad(loss)).lower(trained, state, x).compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    return (sizes[1] - sizes[0]) / 8 / 2**20


def _print_deep() -> float:
    """Print the second table, and return the worst ratio under save_codes."""
    print(f"\nThe gradient of a deep network: {_DEEP[0]} examples, {_DEEP[1]} features, a relu after each layer:\n")
    print("| layers | checkpoints | MiB for each layer | ratio |")
    print("|---|---|--:|--:|")
    everything = jax.checkpoint_policies.everything_saveable
    rows = [
        ("float32", "none", None, None), ("float32", "of each layer, everything saveable", None, everything),
        ("int8, static", "none", training._INT8, None),
        ("int8, static", "of each layer, save_codes", training._INT8, jq.save_codes),
        ("int8, dynamic", "of each layer, save_codes", training._DYNAMIC, jq.save_codes),
    ]  # fmt: skip
    sizes = [_per_layer(specs, policy) for _, _, specs, policy in rows]
    best = min(sizes[:2])
    for (layers, checkpoints, _, _), size in zip(rows, sizes, strict=True):
        print(f"| {layers} | {checkpoints} | {size:.2f} | {size / best:.2f} |")
    return max(sizes[3:]) / best


def main() -> int:
    print(f"Python {sys.version.split()[0]}, jax {jax.__version__}\n")
    names = ("float32", "integers", "integers, save_codes")
    print("| network | activations | " + " | ".join(f"{name} MiB" for name in names) + " | ratio | ratio, save_codes |")
    print("|---|---|" + "--:|" * 5)
    worst = 0.0
    for network, shape in _SHAPES.items():
        x = training.batch(network, shape)
        params = training._params(network, shape, x)
        plain = _bytes(training.plain(network, shape[-1]), {"params": params}, shape, None)
        for label, specs in (("int8, static", training._INT8), ("int8, dynamic", training._DYNAMIC)):
            model = training.quantized(network, shape[-1], **specs)
            variables = training._start_ranges(model, params, x)
            sizes = [_bytes(model, variables, shape, policy) for policy in (None, jq.save_codes)]
            cells = (f"{n / 2**20:.2f}" for n in (plain, *sizes))
            ratios = [n / plain for n in sizes]
            worst = max(worst, ratios[1])
            print(f"| {network} {'x'.join(map(str, shape))} | {label} | {' | '.join(cells)} | "
                  f"{ratios[0]:.2f} | {ratios[1]:.2f} |")  # fmt: skip
    worst = max(worst, _print_deep())
    if worst > _LIMIT:
        print(f"save_codes stores {worst:.2f} of float32's bytes, more than {_LIMIT}", file=sys.stderr)
    return int(worst > _LIMIT)


if __name__ == "__main__":
    sys.exit(main())
