"""Modules of jaxquant that are imported on first use. Each test runs in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(program: str) -> None:
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_modules_load_on_first_use() -> None:
    run("""
        import sys, jaxquant as jq
        assert not {"flax", "jaxquant.flax", "jaxquant.checkpoint", "onnx", "jaxquant.onnx"} & set(sys.modules)
        assert not {"jax.extend", "jaxquant.transform"} & set(sys.modules)  # these take a fifth of the time, or more
        assert {"flax", "checkpoint", "onnx", "optim", "matmul"} <= set(dir(jq))
        assert jq.checkpoint.pack.__name__ == "pack"
        assert not {"flax", "onnx"} & set(sys.modules)
        assert jq.onnx.load.__name__ == "load"
        assert jq.flax.fold_batch_norm.__name__ == "fold_batch_norm"
        assert "jaxquant.flax.nnx" not in sys.modules
        assert {"linen", "nnx", "convert"} <= set(dir(jq.flax))
        assert jq.flax.nnx.convert.__module__.startswith("jaxquant.flax")
        assert jq.flax.linen is __import__("jaxquant.flax.linen").flax.linen
        for module in (jq, jq.flax):
            try:
                module.linnen
            except AttributeError as error:
                assert str(error) == f"module {module.__name__!r} has no attribute 'linnen'", error
            else:
                raise AssertionError
        from jaxquant.flax import linen, nnx
        from jaxquant import checkpoint, flax
        assert (checkpoint, flax, nnx) == (jq.checkpoint, jq.flax, jq.flax.nnx)
    """)


def test_the_root_imports_arrays_operators_and_contractions_only() -> None:
    """Import time follows the number of modules, so the test counts them."""
    run("""
        import sys, jax
        before = set(sys.modules)
        import jaxquant as jq
        new = set(sys.modules) - before
        assert all(name.partition(".")[0] == "jaxquant" for name in new), new
        packages = {name.split(".")[1] for name in new if "." in name}
        assert packages == {"_core", "_kernels", "_arrays", "_onnx_ops", "_contractions", "integer"}, packages
        assert len(new) <= 50, sorted(new)
    """)


def test_names_that_load_on_first_use_are_kept() -> None:
    run("""
        import jaxquant as jq
        assert "fake_quantize" not in vars(jq)
        from jaxquant import fake_quantize
        assert vars(jq)["fake_quantize"] is fake_quantize is jq.fake_quantize
        assert fake_quantize.__module__ == "jaxquant._training.fake_quantize"
    """)


def test_flax_is_missing() -> None:
    run("""
        import sys
        import jaxquant as jq

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == "flax":
                    raise ModuleNotFoundError("No module named 'flax'", name="flax")

        sys.meta_path.insert(0, Missing())
        for statement in ("jq.flax", "jq.flax.nnx", "from jaxquant import flax"):
            try:
                exec(statement)
            except ModuleNotFoundError as error:
                text = 'jaxquant.flax: expected the package flax: pip install "jaxquant[flax]", got none installed'
                assert str(error) == text and error.name == "flax", error
            else:
                raise AssertionError
        jq.checkpoint.pack
    """)


def test_optax_is_missing() -> None:
    """The package that is missing has another name than the module."""
    run("""
        import sys
        import jaxquant as jq
        assert "optax" not in sys.modules
        sys.modules["optax"] = None
        try:
            jq.optim
        except ModuleNotFoundError as error:
            text = 'jaxquant.optim: expected the package optax: pip install "jaxquant[optim]", got none installed'
            assert str(error) == text and error.name == "optax", error
        else:
            raise AssertionError
        del sys.modules["optax"]
        assert jq.optim.quantize_state.__name__ == "quantize_state"
    """)


def test_dir_lists_only_names_that_resolve() -> None:
    """Tools such as doctest and inspect read the value of each name in dir(), which must not fail."""
    run("""
        import importlib.util, inspect, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "flax" else find(name, package)
        import jaxquant as jq
        assert "flax" not in dir(jq)
        assert "checkpoint" in dict(inspect.getmembers(jq))
        assert "flax" not in sys.modules
    """)


def test_the_error_names_another_missing_module() -> None:
    run("""
        import sys
        sys.modules["jaxquant.flax.linen"] = None
        import jaxquant as jq
        try:
            jq.flax
        except ModuleNotFoundError as error:
            assert error.name == "jaxquant.flax.linen", error
        else:
            raise AssertionError
    """)
