"""The Triton kernels behind `fused.py`: both stages of Visual-Contrast Attention, one program a head of an image.

Equations of arXiv 2511.00833, section 1 of whose letters are used (+ and - are `positive` and `negative`, or 1 and 2):

    t       = AvgPool(q)                                  n x d
    t+, t-  = (t + e+) / sqrt(d), (t + e-) / sqrt(d)      or t alone, or e alone
    y       = v+ - lambda1 v-                             with v+ = softmax(t+ k^T) v and v- = softmax(t- k^T) v
    V       = (1 - lambda_init) RMSNorm(y)                `contrast`, the contrast map, n x d
    A       = softmax(q t+^T) - lambda2 softmax(q t-^T)   T x n
    out     = (1 - lambda_init) RMSNorm(A V)              T x d

Sizes: N images, M heads, T tokens (PREFIX others, then an H x W grid), d head width, n = h * w contrast tokens. A
program walks over the T tokens in blocks of B, so nothing of size T x n leaves the chip. n is padded to C, a power of
two: the padded contrast tokens are zero.

Columns: a matrix with d columns is a tuple of one or two blocks of columns, whose widths are powers of two (D1 and D2:
64 is one block, 72 is 64 + 16), since a Triton block must have such a width, and 72 padded to 128 would cost 78 % more
arithmetic. The functions of the first part hide this. Columns beyond d are zero.

Gradients: g_x is that of x. Through p = softmax(s) it is g_s = p (g_p - the sum of p g_p over the row). A program
leaves its share of the gradients of the parameters, which `reduce` sums over images and heads: no atomics, so equal
inputs give equal results.

Registers decide the speed of the backward pass. The loops leave operands that do not change in shared memory
(`disable_licm`), and hold nothing that another loop can read again: see `backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-5)
"""Of both RMSNorms, as in `attention.py`."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x LOG2_E); the hardware has exp2 only."""


# ---------------------------------------------------------------------------------------------------------------------
# Matrices as tuples of column blocks


@triton.jit
def _columns(D1: tl.constexpr, D2: tl.constexpr):
    """Indices of the columns, a vector for each block."""
    if D2 == 0:
        return (tl.arange(0, D1),)
    else:
        return (tl.arange(0, D1), D1 + tl.arange(0, D2))


@triton.jit
def _mask(valid, x, d: tl.constexpr):
    """Which elements exist of the rows `valid` and the columns x."""
    if valid is None:
        return (x < d)[None, :]
    else:
        return valid[:, None] & (x < d)[None, :]


@triton.jit
def _load(base, rows, stride, valid, columns, d: tl.constexpr):
    """The given rows, `stride` apart, of a matrix; zero where not `valid`."""
    return [tl.load(base + (rows[:, None] * stride + x[None, :]), _mask(valid, x, d), 0.0) for x in columns]


@triton.jit
def _store(base, rows, stride, valid, columns, d: tl.constexpr, matrix):
    for i in tl.static_range(len(columns)):
        x = columns[i]
        tl.store(base + (rows[:, None] * stride + x[None, :]), matrix[i].to(base.dtype.element_ty), _mask(valid, x, d))


@triton.jit
def _load_row(base, rows, valid):
    """A number for each row; zero where not `valid`."""
    if valid is None:
        return tl.load(base + rows)
    else:
        return tl.load(base + rows, valid, 0.0)


@triton.jit
def _store_vector(base, columns, d: tl.constexpr, vector):
    for i in tl.static_range(len(columns)):
        tl.store(base + columns[i], vector[i], columns[i] < d)


@triton.jit
def _zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    if D2 == 0:
        return (tl.zeros((ROWS, D1), tl.float32),)
    else:
        return (tl.zeros((ROWS, D1), tl.float32), tl.zeros((ROWS, D2), tl.float32))


@triton.jit
def _cast(a, dtype: tl.constexpr):
    return [x.to(dtype) for x in a]


@triton.jit
def _scale_rows(a, factors):
    return [x * factors[:, None] for x in a]


@triton.jit
def _plus(a, b, factor):
    """a + factor b."""
    if len(a) == 1:
        return (a[0] + factor * b[0],)
    else:
        return (a[0] + factor * b[0], a[1] + factor * b[1])


@triton.jit
def _times(a, b):
    """Elementwise; either may be a row that is broadcast."""
    if len(a) == 1:
        return (a[0] * b[0],)
    else:
        return (a[0] * b[0], a[1] * b[1])


@triton.jit
def _row_dots(a, b):
    """Scalar products of the rows of a with those of b."""
    dots = tl.sum(a[0] * b[0], 1)
    if len(a) == 2:
        dots += tl.sum(a[1] * b[1], 1)
    return dots


@triton.jit
def _a_bt(a, b, PRECISION: tl.constexpr):
    """a b^T, both with d columns."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) == 2:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def _p_b(p, b, total, PRECISION: tl.constexpr):
    """total + p b, where p is a plain matrix and b has d columns."""
    if len(b) == 1:
        return (tl.dot(p, b[0], total[0], input_precision=PRECISION),)
    else:
        return (
            tl.dot(p, b[0], total[0], input_precision=PRECISION),
            tl.dot(p, b[1], total[1], input_precision=PRECISION),
        )


# ---------------------------------------------------------------------------------------------------------------------
# The parts of the equations


@triton.jit
def _lambda_vectors(vectors, x, d: tl.constexpr):
    """The rows q1, k1, q2, k2 of a matrix (4, d)."""
    q1, k1 = tl.load(vectors + x, x < d, 0.0), tl.load(vectors + d + x, x < d, 0.0)
    q2, k2 = tl.load(vectors + 2 * d + x, x < d, 0.0), tl.load(vectors + 3 * d + x, x < d, 0.0)
    return q1.to(tl.float32), k1.to(tl.float32), q2.to(tl.float32), k2.to(tl.float32)


@triton.jit
def _lambda(vectors, lambda_init, d: tl.constexpr, P: tl.constexpr):
    """exp(q1 k1) - exp(q2 k2) + lambda_init; P >= d is a power of two."""
    q1, k1, q2, k2 = _lambda_vectors(vectors, tl.arange(0, P), d)
    return tl.exp(tl.sum(q1 * k1)) - tl.exp(tl.sum(q2 * k2)) + lambda_init


@triton.jit
def _weights(weight, lambda_init, columns, d: tl.constexpr):
    """(1 - lambda_init) times the weights of an RMSNorm, as a row."""
    return [(1 - lambda_init) * tl.load(weight + x, x < d, 0.0).to(tl.float32)[None, :] for x in columns]


@triton.jit
def _bins(C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr):
    """First row, one past the last row, and so the columns of each bin of the pooling, by PyTorch's rule; (C,) each."""
    c = tl.arange(0, C)
    i, j = c // w, c % w
    return i * H // h, ((i + 1) * H + h - 1) // h, j * W // w, ((j + 1) * W + w - 1) // w


@triton.jit
def _bin_shares(C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr):
    """One over the number of tokens in each bin, (C,)."""
    top, bottom, left, right = _bins(C, H, W, h, w)
    return 1.0 / ((bottom - top) * (right - left)).to(tl.float32)


@triton.jit
def _pool(
    q, stride, columns, n: tl.constexpr, d: tl.constexpr, C: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """t, the averages of the queries over the bins of at most KH x KW tokens: (C, d) in float32."""
    top, bottom, left, right = _bins(C, H, W, h, w)
    exists = tl.arange(0, C) < n
    sums = _zeros(C, D1, D2)
    for a in range(KH):
        for b in range(KW):
            inside = exists & (top + a < bottom) & (left + b < right)
            queries = _load(q, (top + a) * W + left + b, stride, inside, columns, d)
            sums = _plus(sums, _cast(queries, tl.float32), 1.0)
    return _scale_rows(sums, _bin_shares(C, H, W, h, w))


@triton.jit
def _in_bin(
    token, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
):  # fmt: skip
    """One where a token lies in a bin, else zero: (B, C) in float32. No bin holds a token < 0."""
    c = tl.arange(0, C)
    row, column = token // W, token % W
    if H % h == 0 and W % w == 0:
        own = tl.where(token < 0, -1, row // (H // h) * w + column // (W // w))
        return tl.where(own[:, None] == c[None, :], 1.0, 0.0)
    else:
        top, bottom, left, right = _bins(C, H, W, h, w)
        inside = (row[:, None] >= top[None, :]) & (row[:, None] < bottom[None, :])
        inside &= (column[:, None] >= left[None, :]) & (column[:, None] < right[None, :])
        return tl.where(inside & (c < n)[None, :] & (token >= 0)[:, None], 1.0, 0.0)


@triton.jit
def _stream(
    pooled, embedding, POOL: tl.constexpr, m, columns, n: tl.constexpr, d: tl.constexpr, C: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """t+ or t- of head m, (C, d): the pooled queries (POOL) plus the embedding (M, n, d), over sqrt(d)."""
    if embedding is None:
        tokens = pooled
    else:
        c = tl.arange(0, C)
        tokens = _cast(_load(embedding + m * n * d, c, d, c < n, columns, d), tl.float32)
        if POOL:
            tokens = _plus(tokens, pooled, 1.0)
    return [(x * d**-0.5).to(dtype) for x in tokens]


@triton.jit
def _softmax(x, t, n: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """softmax(x t^T) over the n tokens t, (B, C), and the log-sum-exp of its rows, to base 2."""
    logits = _a_bt(x, t, PRECISION) * LOG2_E
    if n < C:
        logits = tl.where((tl.arange(0, C) < n)[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    p = tl.exp2(logits - top[:, None])
    total = tl.sum(p, 1)
    return p * (1.0 / total)[:, None], top + tl.log2(total)


@triton.jit
def _again(x, t, lse, n: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """What _softmax has given, from its log-sum-exp."""
    p = tl.exp2(_a_bt(x, t, PRECISION) * LOG2_E - lse[:, None])
    if n < C:
        p = tl.where((tl.arange(0, C) < n)[None, :], p, 0.0)
    return p


@triton.jit
def _again_by_tokens(t, k, lse, valid, PRECISION: tl.constexpr):
    """softmax(t k^T) from its log-sum-exp, (C, B): zero for padded tokens, whose lse is infinite, and padded keys."""
    p = tl.exp2(_a_bt(t, k, PRECISION) * LOG2_E - lse[:, None])
    if valid is not None:
        p = tl.where(valid[None, :], p, 0.0)
    return p


@triton.jit
def _rms_norm(x, weights, d: tl.constexpr):
    """RMSNorm of each row: the normalised rows before the weights, one over their root mean square, and the result."""
    r = tl.rsqrt(_row_dots(x, x) / d + EPS)
    x_hat = _scale_rows(x, r)
    return x_hat, r, _times(x_hat, weights)


@triton.jit
def _rms_norm_backward(g, x_hat, r, weights, d: tl.constexpr):
    """Gradient of the rows, and of the weights times (1 - lambda_init): g x_hat summed over the rows."""
    g_hat = _times(g, weights)
    g_x = _scale_rows(_plus(g_hat, _scale_rows(x_hat, _row_dots(g_hat, x_hat) / d), -1.0), r)
    return g_x, [tl.sum(x, 0) for x in _times(g, x_hat)]


@triton.jit
def _online(t, k, v, valid, top, total, values, PRECISION: tl.constexpr):
    """One more block of keys and values of softmax(t k^T) v: running maximum, sum, and values times the sum."""
    logits = _a_bt(t, k, PRECISION) * LOG2_E
    if valid is not None:
        logits = tl.where(valid[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    p, shrink = tl.exp2(logits - new_top[:, None]), tl.exp2(top - new_top)
    values = _p_b(p.to(v[0].dtype), v, _scale_rows(values, shrink), PRECISION)
    return new_top, total * shrink + tl.sum(p, 1), values


@triton.jit
def _logits_backward(p1, p2, g_p, dots1, dots2, lambda_, dtype: tl.constexpr):
    """Gradients of the logits of p1 and p2, given that of p1 - lambda p2 and the sums of p g_p over each softmax."""
    return (p1 * (g_p - dots1)).to(dtype), (p2 * (lambda_ * dots2 - lambda_ * g_p)).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels; a tensor's shape stands beside it where it is first used


@triton.jit
def forward(
    qkv, embedding1, embedding2, lambdas1, lambdas2, weight1, weight2, out, saved, lse1, lse2, M, lambda_init,
    POOL1: tl.constexpr, POOL2: tl.constexpr, n: tl.constexpr, d: tl.constexpr, C: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, P: tl.constexpr, B: tl.constexpr, T: tl.constexpr, PREFIX: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out, and for the backward pass y and v- (`saved`) and the log-sum-exps of both stages."""
    program = tl.program_id(0).to(tl.int64)
    image, m = program // M, program % M
    stride = 3 * M * d
    q = qkv + image * T * stride + m * d  # qkv (N, T, 3, M, d)
    k, v = q + M * d, q + 2 * M * d
    out += image * T * M * d + m * d  # (N, T, M, d)
    saved += program * 2 * n * d  # (N, M, 2, n, d)
    lse1 += program * 2 * n  # (N, M, 2, n)
    lse2 += program * 2 * T  # (N, M, 2, T)
    dtype = qkv.dtype.element_ty
    c, rows, columns = tl.arange(0, C), tl.arange(0, B), _columns(D1, D2)

    pooled = _pool(q + PREFIX * stride, stride, columns, n, d, C, D1, D2, H, W, h, w, KH, KW)
    positive = _stream(pooled, embedding1, POOL1, m, columns, n, d, C, dtype)  # embeddings (M, n, d)
    negative = _stream(pooled, embedding2, POOL2, m, columns, n, d, C, dtype)

    # Stage I: v+ and v-, y, V
    top1 = tl.full((C,), float("-inf"), tl.float32)
    top2 = tl.full((C,), float("-inf"), tl.float32)
    total1, total2 = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    v1, v2 = _zeros(C, D1, D2), _zeros(C, D1, D2)
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        keys = _load(k + first * stride, rows, stride, valid, columns, d)
        values = _load(v + first * stride, rows, stride, valid, columns, d)
        top1, total1, v1 = _online(positive, keys, values, valid, top1, total1, v1, PRECISION)
        top2, total2, v2 = _online(negative, keys, values, valid, top2, total2, v2, PRECISION)
    v2 = _scale_rows(v2, 1.0 / total2)
    y = _plus(_scale_rows(v1, 1.0 / total1), v2, -_lambda(lambdas1, lambda_init, d, P))  # lambdas (4, d)
    _y_hat, _y_r, contrast = _rms_norm(y, _weights(weight1, lambda_init, columns, d), d)  # weights (d,)
    contrast = _cast(contrast, dtype)
    _store(saved, c, d, c < n, columns, d, y)
    _store(saved + n * d, c, d, c < n, columns, d, v2)
    tl.store(lse1 + c, top1 + tl.log2(total1), c < n)
    tl.store(lse1 + n + c, top2 + tl.log2(total2), c < n)

    # Stage II: A, A V, out
    lambda2 = _lambda(lambdas2, lambda_init, d, P)
    weights2 = _weights(weight2, lambda_init, columns, d)
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        queries = _load(q + first * stride, rows, stride, valid, columns, d)
        p1, log_sum1 = _softmax(queries, positive, n, C, PRECISION)
        p2, log_sum2 = _softmax(queries, negative, n, C, PRECISION)
        a_v = _p_b((p1 - lambda2 * p2).to(dtype), contrast, _zeros(B, D1, D2), PRECISION)
        _hat, _r, result = _rms_norm(a_v, weights2, d)
        _store(out + first * M * d, rows, M * d, valid, columns, d, result)
        tl.store(lse2 + first + rows, log_sum1, valid)
        tl.store(lse2 + T + first + rows, log_sum2, valid)


@triton.jit
def backward(
    qkv, embedding1, embedding2, lambdas1, lambdas2, weight1, weight2, saved, lse1, lse2, g_out, g_qkv, g_streams,
    g_y_rows, g_lambdas, g_weights, M, lambda_init,
    POOL1: tl.constexpr, POOL2: tl.constexpr, n: tl.constexpr, d: tl.constexpr, C: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, P: tl.constexpr, B: tl.constexpr, T: tl.constexpr, PREFIX: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, h: tl.constexpr, w: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """g_qkv, and this program's share of the gradients of t+ and t-, both lambdas and both norms' weights.

    Each stage takes two loops, so that none needs more registers than there are: the second computes both maps again,
    4 of 21 products in all. Between the loops the gradient of A V waits in the place of g_q, that of y in g_y_rows,
    those of t+ and t- in g_streams.
    """
    program = tl.program_id(0).to(tl.int64)
    image, m = program // M, program % M
    stride = 3 * M * d
    q = qkv + image * T * stride + m * d  # qkv and g_qkv (N, T, 3, M, d)
    k, v = q + M * d, q + 2 * M * d
    g_q = g_qkv + image * T * stride + m * d
    g_k, g_v = g_q + M * d, g_q + 2 * M * d
    g_out += image * T * M * d + m * d  # (N, T, M, d)
    saved += program * 2 * n * d  # (N, M, 2, n, d)
    g_streams += program * 2 * n * d  # (N, M, 2, n, d)
    g_y_rows += program * n * d  # (N, M, n, d), a scratch
    lse1 += program * 2 * n  # (N, M, 2, n)
    lse2 += program * 2 * T  # (N, M, 2, T)
    g_lambdas += program * 2  # (N, M, 2)
    g_weights += program * 2 * d  # (N, M, 2, d)
    dtype = qkv.dtype.element_ty
    c, rows, columns = tl.arange(0, C), tl.arange(0, B), _columns(D1, D2)

    pooled = _pool(q + PREFIX * stride, stride, columns, n, d, C, D1, D2, H, W, h, w, KH, KW)
    positive = _stream(pooled, embedding1, POOL1, m, columns, n, d, C, dtype)
    negative = _stream(pooled, embedding2, POOL2, m, columns, n, d, C, dtype)
    lambda1, lambda2 = _lambda(lambdas1, lambda_init, d, P), _lambda(lambdas2, lambda_init, d, P)
    weights1, weights2 = _weights(weight1, lambda_init, columns, d), _weights(weight2, lambda_init, columns, d)
    y = _cast(_load(saved, c, d, c < n, columns, d), tl.float32)
    _y_hat, _y_r, contrast = _rms_norm(y, weights1, d)
    contrast = _cast(contrast, dtype)

    # Stage II, the norm: gradients of A V, of V and of the weights
    g_contrast = _zeros(C, D1, D2)
    g_weight2 = [tl.sum(x, 0) for x in _zeros(B, D1, D2)]
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        queries = _load(q + first * stride, rows, stride, valid, columns, d)
        p1 = _again(queries, positive, _load_row(lse2 + first, rows, valid), n, C, PRECISION)
        p2 = _again(queries, negative, _load_row(lse2 + T + first, rows, valid), n, C, PRECISION)
        a = (p1 - lambda2 * p2).to(dtype)
        hat, r, _out = _rms_norm(_p_b(a, contrast, _zeros(B, D1, D2), PRECISION), weights2, d)
        g = _cast(_load(g_out + first * M * d, rows, M * d, valid, columns, d), tl.float32)
        g_a_v, g_weight = _rms_norm_backward(g, hat, r, weights2, d)
        g_weight2 = _plus(g_weight2, g_weight, 1.0)
        g_a_v = _cast(g_a_v, dtype)
        g_contrast = _p_b(tl.trans(a), g_a_v, g_contrast, PRECISION)
        _store(g_q + first * stride, rows, stride, valid, columns, d, g_a_v)
    _store_vector(g_weights + d, columns, d, g_weight2)

    # Stage I, the norm: gradients of y, of the weights and of lambda1
    y = _cast(_load(saved, c, d, c < n, columns, d), tl.float32)
    v2 = _cast(_load(saved + n * d, c, d, c < n, columns, d), tl.float32)
    y_hat, y_r, _contrast = _rms_norm(y, weights1, d)
    g_y, g_weight1 = _rms_norm_backward(g_contrast, y_hat, y_r, weights1, d)
    g_v2_v2 = _row_dots(g_y, v2)  # the sum of p2 g_p in Stage I, since v- = p2 v and g_p = g_y v^T
    g_v1_v1 = _row_dots(g_y, y) + lambda1 * g_v2_v2  # of p1 g_p, since v+ = y + lambda1 v-
    tl.store(g_lambdas, -tl.sum(g_v2_v2))
    _store_vector(g_weights, columns, d, g_weight1)
    _store(g_y_rows, c, d, c < n, columns, d, g_y)
    tl.debug_barrier()  # other threads read these rows of g_q and of g_y

    # Stage II, the maps: gradients of q, t+, t- and lambda2
    g_positive, g_negative = _zeros(C, D1, D2), _zeros(C, D1, D2)
    g_lambda2 = tl.zeros((B,), tl.float32)
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        queries = _load(q + first * stride, rows, stride, valid, columns, d)
        g_a_v = _load(g_q + first * stride, rows, stride, valid, columns, d)
        p1 = _again(queries, positive, _load_row(lse2 + first, rows, valid), n, C, PRECISION)
        p2 = _again(queries, negative, _load_row(lse2 + T + first, rows, valid), n, C, PRECISION)
        g_a = _a_bt(g_a_v, contrast, PRECISION)
        dots1, dots2 = tl.sum(p1 * g_a, 1), tl.sum(p2 * g_a, 1)
        g_lambda2 -= dots2
        g_s1, g_s2 = _logits_backward(p1, p2, g_a, dots1[:, None], dots2[:, None], lambda2, dtype)
        g_positive = _p_b(tl.trans(g_s1), queries, g_positive, PRECISION)
        g_negative = _p_b(tl.trans(g_s2), queries, g_negative, PRECISION)
        g_queries = _p_b(g_s1, positive, _zeros(B, D1, D2), PRECISION)
        g_queries = _p_b(g_s2, negative, g_queries, PRECISION)
        tl.debug_barrier()  # all have read these rows of g_q
        _store(g_q + first * stride, rows, stride, valid, columns, d, g_queries)
    tl.store(g_lambdas + 1, tl.sum(g_lambda2))
    _store(g_streams, c, d, c < n, columns, d, g_positive)
    _store(g_streams + n * d, c, d, c < n, columns, d, g_negative)
    tl.debug_barrier()  # other threads read these rows of g_streams

    # Stage I, the values: gradient of v
    g_y = _load(g_y_rows, c, d, c < n, columns, d)
    log_sum1, log_sum2 = tl.load(lse1 + c, c < n, float("inf")), tl.load(lse1 + n + c, c < n, float("inf"))
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        keys = _load(k + first * stride, rows, stride, valid, columns, d)
        p1 = _again_by_tokens(positive, keys, log_sum1, valid, PRECISION)
        p2 = _again_by_tokens(negative, keys, log_sum2, valid, PRECISION)
        g_values = _p_b(tl.trans((p1 - lambda1 * p2).to(dtype)), g_y, _zeros(B, D1, D2), PRECISION)
        _store(g_v + first * stride, rows, stride, valid, columns, d, g_values)

    # Stage I, the maps: gradients of k, t+ and t-
    g_positive = _load(g_streams, c, d, c < n, columns, d)
    g_negative = _load(g_streams + n * d, c, d, c < n, columns, d)
    for first in tl.range(0, T, B, disable_licm=True):
        valid = None if T % B == 0 else first + rows < T
        keys = _load(k + first * stride, rows, stride, valid, columns, d)
        values = _load(v + first * stride, rows, stride, valid, columns, d)
        p1 = _again_by_tokens(positive, keys, log_sum1, valid, PRECISION)
        p2 = _again_by_tokens(negative, keys, log_sum2, valid, PRECISION)
        g_p = _a_bt(g_y, values, PRECISION)
        g_s1, g_s2 = _logits_backward(p1, p2, g_p, g_v1_v1[:, None], g_v2_v2[:, None], lambda1, dtype)
        g_positive = _p_b(g_s1, keys, g_positive, PRECISION)
        g_negative = _p_b(g_s2, keys, g_negative, PRECISION)
        g_keys = _p_b(tl.trans(g_s1), positive, _zeros(B, D1, D2), PRECISION)
        g_keys = _p_b(tl.trans(g_s2), negative, g_keys, PRECISION)
        _store(g_k + first * stride, rows, stride, valid, columns, d, g_keys)
    g_positive, g_negative = [x * d**-0.5 for x in g_positive], [x * d**-0.5 for x in g_negative]
    tl.debug_barrier()  # all have read g_streams
    _store(g_streams, c, d, c < n, columns, d, g_positive)
    _store(g_streams + n * d, c, d, c < n, columns, d, g_negative)

    # The pooling: each query takes its share of the bins that it lies in
    if POOL1 or POOL2:
        g_pooled = _scale_rows(_plus([x * POOL1 for x in g_positive], g_negative, POOL2), _bin_shares(C, H, W, h, w))
        g_pooled = _cast(g_pooled, dtype)
        for first in tl.range(0, T, B, disable_licm=True):
            valid = None if T % B == 0 else first + rows < T
            g_queries = _cast(_load(g_q + first * stride, rows, stride, valid, columns, d), tl.float32)
            inside = _in_bin(first + rows - PREFIX, n, C, H, W, h, w).to(dtype)
            g_queries = _p_b(inside, g_pooled, g_queries, PRECISION)
            tl.debug_barrier()  # all have read these rows of g_q
            _store(g_q + first * stride, rows, stride, valid, columns, d, g_queries)


@triton.jit
def _sum_rows(base, rows, stride, x, exists, ROWS: tl.constexpr):
    """Sum of `rows` rows, `stride` apart, at the columns x."""
    total = tl.zeros((ROWS, x.shape[0]), tl.float32)
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & exists[None, :]
        total += tl.load(base + r[:, None].to(tl.int64) * stride + x[None, :], inside, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _store_if(base, x, value, exists):
    if base is not None:
        tl.store(base + x, value.to(base.dtype.element_ty), exists)


@triton.jit
def reduce(
    g_streams, g_lambdas, g_weights, lambdas1, lambdas2, g_embedding1, g_embedding2, g_lambdas1, g_lambdas2, g_weight1,
    g_weight2, N, M, lambda_init, n: tl.constexpr, d: tl.constexpr, P: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Gradients of the parameters out of the shares of all programs of `backward`, always summed in the same order.

    One program for each E numbers of the embeddings, then for each K of the norms' weights, then for each lambda.
    """
    program = tl.program_id(0)
    size, blocks, groups = n * d, tl.cdiv(2 * M * n * d, E), (d + K - 1) // K
    if program < blocks:
        x = program * E + tl.arange(0, E)  # position in (M, 2, n, d)
        exists = x < 2 * M * size
        total = _sum_rows(g_streams, N, 2 * M * size, x, exists, 8)
        stream, inner = x // size % 2, x // (2 * size) * size + x % size
        _store_if(g_embedding1, inner, total, exists & (stream == 0))
        _store_if(g_embedding2, inner, total, exists & (stream == 1))
    elif program < blocks + 2 * groups:
        stage, group = (program - blocks) // groups, (program - blocks) % groups
        x = group * K + tl.arange(0, K)
        total = (1 - lambda_init) * _sum_rows(g_weights + stage * d, N * M, 2 * d, x, x < d, 128)
        _store_if(g_weight1, x, total, (x < d) & (stage == 0))
        _store_if(g_weight2, x, total, (x < d) & (stage == 1))
    elif program == blocks + 2 * groups:
        _lambda_backward(g_lambdas, N * M, lambdas1, g_lambdas1, d, P)
    else:
        _lambda_backward(g_lambdas + 1, N * M, lambdas2, g_lambdas2, d, P)


@triton.jit
def _lambda_backward(shares, rows, vectors, g_vectors, d: tl.constexpr, P: tl.constexpr):
    """Gradients of q1, k1, q2, k2 in lambda = exp(q1 k1) - exp(q2 k2) + lambda_init."""
    nothing = tl.arange(0, 1)
    g = tl.sum(_sum_rows(shares, rows, 2, nothing, nothing == 0, 1024))
    x = tl.arange(0, P)
    q1, k1, q2, k2 = _lambda_vectors(vectors, x, d)
    g_dot1, g_dot2 = g * tl.exp(tl.sum(q1 * k1)), -g * tl.exp(tl.sum(q2 * k2))
    _store_if(g_vectors, x, g_dot1 * k1, x < d)
    _store_if(g_vectors, d + x, g_dot1 * q1, x < d)
    _store_if(g_vectors, 2 * d + x, g_dot2 * k2, x < d)
    _store_if(g_vectors, 3 * d + x, g_dot2 * q2, x < d)
