"""Flax layers that train, convert and serve. Imported by hand: it needs flax, the extra `flax`."""

from ._batch_norm import fold_batch_norm as fold_batch_norm
from ._calibrate import calibrate as calibrate
from ._calibrate import check_calibrated as check_calibrated
from ._contraction import promote_dtype as promote_dtype
from ._convert import convert as convert
from ._inject import conv_general_dilated as conv_general_dilated
from ._inject import dot_general as dot_general
from ._range import Dynamic as Dynamic
from ._range import Learned as Learned
from ._range import Observed as Observed
