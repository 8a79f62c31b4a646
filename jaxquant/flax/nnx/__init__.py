"""Flax NNX's layers with quantized weights and activations: same names, same arguments, same parameters."""

from .calibrate import calibrate as calibrate
from .calibrate import calibration_view as calibration_view
from .calibrate import check_calibrated as check_calibrated
from .contraction import Codes as Codes
from .contraction import Ranges as Ranges
from .contraction import Scale as Scale
from .contraction import promote_dtype as promote_dtype
from .convert import convert as convert
from .convert import fold_batch_norm as fold_batch_norm
from .convert import start as start
from .layers import Conv as Conv
from .layers import Einsum as Einsum
from .layers import Embed as Embed
from .layers import Linear as Linear
from .layers import LinearGeneral as LinearGeneral
from .layers import conv_general_dilated as conv_general_dilated
from .layers import dot_general as dot_general
