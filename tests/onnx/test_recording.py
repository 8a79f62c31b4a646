"""The recording of operations: nothing of it is in other programs, in the caches or in other threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant._core import recording
from jaxquant._program import jaxpr as programs

UINT8 = jq.QuantSpec(jnp.uint8)
W = jq.quantize(jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))


def contract(x: jax.Array) -> jax.Array:
    return jq.matmul(jq.quantize(x, UINT8, range=(-1.0, 1.55)), W)


def list_marks(function, *arguments) -> list[str]:
    """Return the marks in the program of a function, those in its calls, loops and branches included."""

    def walk(program) -> list[str]:
        names = []
        for equation in program.eqns:
            if programs.read_name(equation) == "jaxquant_mark":
                names.append(equation.params["mark"].name)
            for body in programs.list_bodies(equation):
                names += walk(body.program)
        return names

    return walk(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1],
        lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: f(-x), x),
        lambda f: jax.vmap(lambda row: f(row[None])[0]),
    ],
    ids=["eager", "jit", "checkpoint", "scan", "cond", "vmap"],
)
def test_marks_are_only_in_recorded_programs(wrap) -> None:
    x, function = jnp.ones((2, 4)), wrap(contract)
    function(x)  # leaves traces in the caches
    assert list_marks(function, x) == []
    with recording.record():
        names = list_marks(function, x)
    assert {"quantize", "contract", "scale"} <= set(names)
    assert list_marks(function, x) == []


def test_other_threads_do_not_record() -> None:
    names: list[list[str]] = []
    with recording.record():
        thread = threading.Thread(target=lambda: names.append(list_marks(contract, jnp.ones((2, 4)))))
        thread.start()
        thread.join()
    assert names == [[]]


@pytest.mark.slow
def test_recorded_programs_have_the_same_results(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(0, 2, (5, 4)), jnp.float32)
    expected = jax.jit(contract)(x), jax.jit(jax.vmap(lambda row: contract(row[None])))(x)
    with recording.record():
        results = jax.jit(contract)(x), jax.jit(jax.vmap(lambda row: contract(row[None])))(x)
        jax.jit(jax.grad(lambda x: contract(x).sum()))(x)  # the derivative is that of the arithmetic
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, value)


@pytest.mark.slow
def test_the_import_of_the_exporter_changes_no_program() -> None:
    program = """
        import jax, jax.numpy as jnp, jaxquant as jq
        x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
        def f(x):
            q = jq.quantize(w, jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
            return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8)), q)
        before = str(jax.make_jaxpr(f)(x))
        from jaxquant import onnx
        onnx.export(f, [x])
        jax.clear_caches()
        assert str(jax.make_jaxpr(f)(x)) == before
    """
    text = "\n".join(line[8:] for line in program.splitlines())
    process = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
