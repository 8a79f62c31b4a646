"""Arithmetic on plain arrays, in the forms that each backend runs fast and that no rewriting by XLA changes.

Every form that exists for the sake of speed on one backend is here, and only here does code ask for the platform. The
functions take and return arrays, trust their arguments, and say in a word or by their name what a caller wants. Each
module begins with the reason for its forms, and says when each is chosen.

What XLA:CPU does, and what follows from it:

- It has a vector kernel for int8 by int8 to int32, for two rows or more in two layouts. Its neighbors (uint8, one row,
  other layouts, operands widened to int32) are scalar loops, 10 to 300 times slower. `signed_codes` makes operands
  int8. `contraction` brings any dimensions into the two layouts, and has the form for one row and the corrections for
  zero points, which keep the operands within 8 bits.
- Its int8 convolution is fast in NHWC with HWIO weights and more than a few channels. `convolution` has four forms.
- It folds a transpose into the contraction that follows, which then loses its kernel, and repeats the operations that
  computed an operand for each of its readers. `barriers` stops both, and keeps small fusions on one thread.
- It converts codes of 2 or 4 bits one by one. `packed_codes` reads and writes whole bytes, or every second column.
- It contracts int8 several times faster than float32, and reads a quarter of the bytes: `float_rows` contracts few
  float rows as int8. It vectorizes element-wise work on the rows of a matrix: `float_rows` contracts one row that way.
  `weight_chunks` dequantizes what is left, a chunk of the cache's size at a time.
- It replaces divisions by products with reciprocals, and merges a product with a sum into one rounding. `affine` and
  `accumulator` compute what ONNX Runtime computes whatever XLA rewrites, in forms that it vectorizes: an addition in
  place of a rounding, a clamp of bits in place of a clip.
- Its minima and maxima lose NaN in long arrays, and it reduces along all dimensions but the last one element by
  element. `min_max` compares bits, and folds rows.

No GPU library convolves int8 into int32, and divisions there are approximate: on other backends `convolution` contracts
patches, and `affine` corrects quotients with exact residuals.
"""
