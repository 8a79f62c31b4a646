"""JAX's two contractions over integers with zero points: `jax.lax`'s names and argument order, exact int32 out."""

from .conv_general_dilated import conv_general_dilated as conv_general_dilated
from .dot_general import dot_general as dot_general
