// Ops that look at one row: embedding, norms, elementwise, quantisation, rotation, caches.

#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)
#define WARP (blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5))
#define LANE (threadIdx.x & 31)

DEVICE void embed_element(const Call &c, u32 i, u32 r) {
    using A = embed_op::A; using O = embed_op::O;
    if (i >= c.a[A::dim]) return;
    u64 id = ((const u32 *)c.o[O::ids].at)[r];
    id = id < c.a[A::vocab] ? id : c.a[A::vocab] - 1;
    u64 format = c.a[A::format];
    const u8 *w = plane_row(c.o[O::table], id), *s = plane_row(c.o[O::table + 1], id), *b = plane_row(c.o[O::table + 2], id);
    at<float>(c.o[O::out], r, 0)[i] = (format & 255) == BLOCKS ? block_weight_at(format, w, s, b, i) : weight_at(format, w, s, b, i);
}

extern "C" __global__ void embed(const Call c) {
    wait_for_earlier();
    embed_element(c, INDEX, blockIdx.y);
}

// The inverse of the root of the mean of squares, from a lane's accumulator.
DEVICE float rms_inverse(float acc, u32 dim, float eps) { return 1.0f / sqrtf(fold(acc) / (float)dim + eps); }

// A warp for a row and head. Each lane reads again only what it wrote itself, so outputs may stand on inputs.
extern "C" __global__ void rms_norm(const Call c) {
    using A = rms_norm_op::A; using O = rms_norm_op::O;
    wait_for_earlier();
    u32 u = WARP, heads = c.a[A::heads], dim = c.a[A::dim];
    if (u >= c.a[A::rows] * heads) return;
    u32 r = u / heads, h = u % heads;
    const float *x = at<float>(c.o[O::x], r, h);
    float *out = at<float>(c.o[O::out], r, h), acc = 0.0f;
    for (u32 i = LANE; i < dim; i += 32) acc = fmaf(x[i], x[i], acc);
    float inv = rms_inverse(acc, dim, real(c.a[A::eps])), offset = real(c.a[A::offset]);
    for (u32 i = LANE; i < dim; i += 32) out[i] = (x[i] * inv) * (offset + get(c.o[O::weight], 0, 0, i));
}

extern "C" __global__ void add_rms_norm(const Call c) {
    using A = add_rms_norm_op::A; using O = add_rms_norm_op::O;
    wait_for_earlier();
    u32 u = WARP, heads = c.a[A::heads], dim = c.a[A::dim];
    if (u >= c.a[A::rows] * heads) return;
    u32 r = u / heads, h = u % heads;
    const float *a = at<float>(c.o[O::a], r, h), *b = at<float>(c.o[O::b], r, h);
    float *sum = at<float>(c.o[O::sum], r, h), *out = at<float>(c.o[O::out], r, h), acc = 0.0f;
    for (u32 i = LANE; i < dim; i += 32) {
        float s = a[i] + b[i];
        sum[i] = s;
        acc = fmaf(s, s, acc);
    }
    float inv = rms_inverse(acc, dim, real(c.a[A::eps])), offset = real(c.a[A::offset]);
    for (u32 i = LANE; i < dim; i += 32) out[i] = (sum[i] * inv) * (offset + get(c.o[O::weight], 0, 0, i));
}

extern "C" __global__ void l2_norm(const Call c) {
    using A = l2_norm_op::A; using O = l2_norm_op::O;
    wait_for_earlier();
    u32 u = WARP, heads = c.a[A::heads], dim = c.a[A::dim];
    if (u >= c.a[A::rows] * heads) return;
    u32 r = u / heads, h = u % heads;
    const float *x = at<float>(c.o[O::x], r, h);
    float *out = at<float>(c.o[O::out], r, h), acc = 0.0f;
    for (u32 i = LANE; i < dim; i += 32) acc = fmaf(x[i], x[i], acc);
    float inv = 1.0f / sqrtf(fold(acc) + real(c.a[A::eps])), scale = real(c.a[A::scale]);
    for (u32 i = LANE; i < dim; i += 32) out[i] = (x[i] * inv) * scale;
}

#define UNARY(name, f)                                                              \
    extern "C" __global__ void name(const Call c) {                                 \
        using A = silu_op::A; using O = silu_op::O;                                 \
        wait_for_earlier();                                                         \
        u32 n = INDEX, r = blockIdx.y, dim = c.a[A::dim], h = n / dim, i = n % dim; \
        if (h >= c.a[A::heads]) return;                                             \
        float x = at<float>(c.o[O::x], r, h)[i];                                    \
        at<float>(c.o[O::out], r, h)[i] = f;                                        \
    }
#define BINARY(name, f)                                                             \
    extern "C" __global__ void name(const Call c) {                                 \
        using A = add_op::A; using O = add_op::O;                                   \
        wait_for_earlier();                                                         \
        u32 n = INDEX, r = blockIdx.y, dim = c.a[A::dim], h = n / dim, i = n % dim; \
        if (h >= c.a[A::heads]) return;                                             \
        float a = at<float>(c.o[O::a], r, h)[i], b = at<float>(c.o[O::b], r, h)[i]; \
        at<float>(c.o[O::out], r, h)[i] = f;                                        \
    }
BINARY(add, a + b)
BINARY(mul, a *b)
BINARY(silu_mul, silu_(a) * b)
BINARY(sigmoid_mul, sigmoid_(a) * b)
UNARY(silu, silu_(x))
UNARY(sigmoid, sigmoid_(x))

extern "C" __global__ void mul_rows(const Call c) {
    using A = mul_rows_op::A; using O = mul_rows_op::O;
    wait_for_earlier();
    u32 i = INDEX, r = blockIdx.y;
    if (i >= c.a[A::dim]) return;
    at<float>(c.o[O::out], r, 0)[i] = at<float>(c.o[O::x], r, 0)[i] * at<float>(c.o[O::s], r, 0)[0];
}

extern "C" __global__ void gather_rows(const Call c) {
    using A = gather_rows_op::A; using O = gather_rows_op::O;
    wait_for_earlier();
    u32 i = INDEX, r = blockIdx.y;
    if (i >= c.a[A::dim]) return;
    u64 from = ((const u32 *)c.o[O::select].at)[r];
    from = from < c.a[A::of] ? from : c.a[A::of] - 1;
    at<float>(c.o[O::out], r, 0)[i] = at<float>(c.o[O::x], from, 0)[i];
}

// The code of an activation; `inverse` is 127 over the group's largest magnitude, or 0 where that is 0.
DEVICE int activation_code(float x, float inverse, bool zero) {
    float q = zero ? 0.0f : rintf(x * inverse);
    // A NaN takes code 0.
    if (!(q == q)) return 0;
    q = q < -127.0f ? -127.0f : q > 127.0f ? 127.0f : q;
    return (int)q;
}

DEVICE float finite(float x) {
    const float most = __uint_as_float(0x7f7fffffu);
    return x < -most ? -most : x > most ? most : x;
}

// A warp for a group of a row and head.
extern "C" __global__ void quantize(const Call c) {
    using A = quantize_op::A; using O = quantize_op::O;
    wait_for_earlier();
    u32 heads = c.a[A::heads], dim = c.a[A::dim], group = c.a[A::group], groups = dim / group, u = WARP;
    if (u >= c.a[A::rows] * heads * groups) return;
    u32 g = u % groups, r = u / groups / heads, h = u / groups % heads;
    const float *x = at<float>(c.o[O::x], r, h) + g * group;
    i8 *codes = at<i8>(c.o[O::codes], r, h) + g * group;
    float m = 0.0f;
    for (u32 i = LANE; i < group; i += 32) m = fmaxf(m, fabsf(finite(x[i])));
    m = warp_max(m);
    float inverse = 127.0f / m;
    int sum = 0;
    for (u32 i = LANE; i < group; i += 32) {
        int q = activation_code(finite(x[i]), inverse, m == 0.0f);
        codes[i] = (i8)q;
        sum += q;
    }
    sum = warp_sum(sum);
    if (LANE == 0) {
        float scale = m / 127.0f;
        at<float>(c.o[O::scales], r, h)[g] = scale;
        at<float>(c.o[O::sums], r, h)[g] = scale * (float)sum;
    }
}

// A warp for a row.
extern "C" __global__ void softmax(const Call c) {
    using A = softmax_op::A; using O = softmax_op::O;
    wait_for_earlier();
    u32 r = WARP, dim = c.a[A::dim];
    if (r >= c.a[A::rows]) return;
    const float *x = at<float>(c.o[O::x], r, 0);
    float *out = at<float>(c.o[O::out], r, 0);
    float m = __int_as_float(0xff800000), acc = 0.0f;
    for (u32 i = LANE; i < dim; i += 32) m = fmaxf(m, x[i]);
    m = warp_max(m);
    for (u32 i = LANE; i < dim; i += 32) {
        float e = exp_(x[i] - m);
        acc += e;
        out[i] = e;
    }
    float sum = fold(acc);
    for (u32 i = LANE; i < dim; i += 32) out[i] = out[i] / sum;
}

extern "C" __global__ void weighted_sum(const Call c) {
    using A = weighted_sum_op::A; using O = weighted_sum_op::O;
    wait_for_earlier();
    u32 i = INDEX, r = blockIdx.y, k = c.a[A::k];
    if (i >= c.a[A::dim]) return;
    float acc = 0.0f;
    for (u32 j = 0; j < k; j++) acc = fmaf(at<float>(c.o[O::y], r, j)[i], at<float>(c.o[O::w], r, 0)[j], acc);
    at<float>(c.o[O::out], r, 0)[i] = acc;
}

extern "C" __global__ void rope(const Call c) {
    using A = rope_op::A; using O = rope_op::O;
    wait_for_earlier();
    u32 dim = c.a[A::dim], half = c.a[A::half], n = INDEX, r = blockIdx.y, units = dim - half, h = n / units, i = n % units;
    if (h >= c.a[A::heads]) return;
    const float *x = at<float>(c.o[O::x], r, h), *t = at<float>(c.o[O::table], r, 0);
    float *out = at<float>(c.o[O::out], r, h);
    if (i < half) {
        float a = x[i], b = x[i + half], co = t[i], si = t[half + i];
        out[i] = fmaf(a, co, -(b * si));
        out[i + half] = fmaf(b, co, a * si);
    } else {
        out[i + half] = x[i + half];
    }
}

extern "C" __global__ void kv_write(const Call c) {
    using A = kv_write_op::A; using O = kv_write_op::O;
    wait_for_earlier();
    u32 dim = c.a[A::dim], n = INDEX, r = blockIdx.y, h = n / dim, i = n % dim;
    if (h >= c.a[A::heads]) return;
    Row row = c.step.rows[r];
    float x = at<float>(c.o[O::x], r, h)[i];
    u64 element = (u64)row.pos * c.o[O::cache].row + (u64)h * c.o[O::cache].head + i;
    if (c.o[O::cache].dtype == F16) ((u16 *)(c.o[O::cache].at + row.cache))[element] = float_to_half(x);
    else ((float *)(c.o[O::cache].at + row.cache))[element] = x;
}

// Sine and cosine of a double below 2^20 * pi/2 with the steps of the CPU's: reduction by one to three parts of pi/2, then a
// polynomial for the argument and its tail. Every position times every frequency up to 1 is below that.
DEVICE double sine(double x, double y, bool reduced) {
    double z = x * x, w = z * z;
    double r = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * 2.75573137070700676789e-06) +
               z * w * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10);
    double v = z * x;
    const double s1 = -1.66666666666666324348e-01;
    return reduced ? x - ((z * (0.5 * y - v * r) - y) - v * s1) : x + v * (s1 + z * r);
}

DEVICE double cosine(double x, double y) {
    double z = x * x, w = z * z;
    double r = z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * 2.48015872894767294178e-05)) +
               w * w * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11));
    double hz = 0.5 * z, t = 1.0 - hz;
    return t + (((1.0 - t) - hz) + (z * r - x * y));
}

// Subtracts the nearest multiple of pi/2 from x >= 0; gives which.
DEVICE int reduce(double x, double &y0, double &y1) {
    const double pio2_1 = 1.57079632673412561417e+00, pio2_1t = 6.07710050650619224932e-11;
    const double pio2_2 = 6.07710050630396597660e-11, pio2_2t = 2.02226624879595063154e-21;
    const double pio2_3 = 2.02226624871116645580e-21, pio2_3t = 8.47842766036889956997e-32;
    u32 ix = (u32)((u64)__double_as_longlong(x) >> 32) & 0x7fffffff;
    // Near a multiple of pi/2 more parts are needed.
    bool near = (ix & 0xfffff) == 0x921fb || ix == 0x4012d97c || ix == 0x401921fb;
    if (ix <= 0x401c463b && !near) {
        int n = ix <= 0x4002d97c ? 1 : ix <= 0x400f6a7a ? 2 : ix <= 0x4015fdbc ? 3 : 4;
        double z = x - (double)n * pio2_1, t = (double)n * pio2_1t;
        y0 = z - t;
        y1 = (z - y0) - t;
        return n;
    }
    const double to_int = 6755399441055744.0;
    double fn = (x * 6.36619772367581382433e-01 + to_int) - to_int;
    int n = (int)fn;
    double r = x - fn * pio2_1, w = fn * pio2_1t;
    y0 = r - w;
    int ex = (int)(ix >> 20), ey = (int)((u64)__double_as_longlong(y0) >> 52 & 0x7ff);
    if (ex - ey > 16) {
        double t = r;
        w = fn * pio2_2;
        r = t - w;
        w = fn * pio2_2t - ((t - r) - w);
        y0 = r - w;
        ey = (int)((u64)__double_as_longlong(y0) >> 52 & 0x7ff);
        if (ex - ey > 49) {
            t = r;
            w = fn * pio2_3;
            r = t - w;
            w = fn * pio2_3t - ((t - r) - w);
            y0 = r - w;
        }
    }
    y1 = (r - y0) - w;
    return n;
}

DEVICE void rotation(const Call &c, u32 i, u32 r) {
    using A = rope_table_op::A; using O = rope_table_op::O;
    u32 half = c.a[A::half];
    if (i >= half) return;
    double t = (double)c.step.rows[r].pos * (double)get(c.o[O::inv_freq], 0, 0, i);
    bool negative = t < 0.0;
    double x = negative ? -t : t, co, si;
    u32 ix = (u32)((u64)__double_as_longlong(x) >> 32);
    if (ix <= 0x3fe921fb) {
        co = ix < 0x3e46a09e ? 1.0 : cosine(x, 0.0);
        si = ix < 0x3e500000 ? x : sine(x, 0.0, false);
    } else {
        double y0, y1;
        int n = reduce(x, y0, y1) & 3;
        double s = sine(y0, y1, true), k = cosine(y0, y1);
        si = n == 0 ? s : n == 1 ? k : n == 2 ? -s : -k;
        co = n == 0 ? k : n == 1 ? -s : n == 2 ? -k : s;
    }
    if (negative) si = -si;
    float *out = at<float>(c.o[O::out], r, 0);
    out[i] = (float)co;
    out[half + i] = (float)si;
}

extern "C" __global__ void rope_table(const Call c) {
    wait_for_earlier();
    rotation(c, INDEX, blockIdx.y);
}

// What a step begins with, side by side: the first `blocks` blocks embed, the others make the table of rotations.
struct Begin {
    Call embed, table;
    u64 blocks;
};

extern "C" __global__ void begin(const Begin p) {
    wait_for_earlier();
    u32 blocks = p.blocks;
    if (blockIdx.x < blocks) embed_element(p.embed, INDEX, blockIdx.y);
    else rotation(p.table, INDEX - blocks * blockDim.x, blockIdx.y);
}
