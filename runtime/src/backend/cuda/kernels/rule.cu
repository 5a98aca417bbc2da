// The gated delta rule of prompts in chunks of 64 rows by tensor cores, for --fast: its results are near the contract's, and not its bits.
// docs/cuda.md says how near.
//
// A chunk's rows i with keys k_i, gates g_i and what they write d_i: with G_i the sum of the logarithms of g from the chunk's begin on,
//     d_i = beta_i (v_i - e^(G_i) S^T k_i) - sum over j < i of A_ij d_j,    A_ij = beta_i e^(G_i - G_j) k_i.k_j
// so d = T R, where T = (1 + A)^-1 does not know the state S and R is the first term. Then
//     o_i = e^(G_i) S^T q_i + sum over j <= i of P_ij d_j,    P_ij = e^(G_i - G_j) q_i.k_j
//     S   = e^(G_63) S + sum of k_j (e^(G_63 - G_j) d_j)^T
// Every exponent is zero or less, so nothing overflows. T and P, and keys and queries as halves, are made of all chunks at once
// (fast_rule_chunks); what is left goes from chunk to chunk (fast_rule), a block 32 columns of a head. Operands of tensor cores are F16, sums
// f32, as are the state, the inverse and R before it is an operand. Rows past a chunk's last have zeros for keys, queries, values and beta and
// do not decay.

enum {
    RULE_ROWS = 64,
    RULE_DIM = 128,
    RULE_COLUMNS = 32,
    RULE_THREADS = 256,
    CHUNK_THREADS = 128,
    // Bytes of a chunk's keys, or queries; of T, or P; of gates.
    RULE_KEYS = RULE_ROWS * RULE_DIM * 2,
    RULE_SQUARE = RULE_ROWS * RULE_ROWS * 2,
    RULE_GATES = RULE_ROWS * 16,
    // Of what a key head's chunk is, and a value head's.
    RULE_OF_KEYS = 2 * RULE_KEYS,
    RULE_OF_VALUES = 2 * RULE_SQUARE + RULE_GATES,
    RULE_STAGE = RULE_OF_KEYS + RULE_OF_VALUES,
    RULE_STAGES = 3,
    RULE_STATE = RULE_DIM * RULE_COLUMNS * 2,
    RULE_PART = RULE_ROWS * RULE_COLUMNS * 2,
    // Floats from a column of A to the next, so that what tensor cores leave does not share banks.
    CHUNK_STRIDE = 68,
};

struct Rule {
    Operand q, k, v, decay, beta, state, out;
    Step step;
    // What chunks are by themselves, one after the other: of each key head keys and queries, of each value head T, P and gates, all as they lie
    // in shared memory.
    u8 *room;
    u32 k_heads, v_heads, tiled, chunks;
};

DEVICE u8 *rule_keys(const Rule &p, u32 chunk, u32 head) {
    return p.room + chunk * ((u64)p.k_heads * RULE_OF_KEYS + (u64)p.v_heads * RULE_OF_VALUES) + head * (u64)RULE_OF_KEYS;
}

DEVICE u8 *rule_values(const Rule &p, u32 chunk, u32 head) { return rule_keys(p, chunk, p.k_heads) + head * (u64)RULE_OF_VALUES; }

// Where sixteen bytes of rows of 256, 128 and 64 bytes lie: those of eight rows never share banks.
DEVICE u32 place_256(u32 row, u32 piece) { return row * 256 + (piece ^ (row & 7)) * 16; }
DEVICE u32 place_128(u32 row, u32 piece) { return row * 128 + (piece ^ (row & 7)) * 16; }
DEVICE u32 place_64(u32 row, u32 piece) { return row * 64 + (piece ^ (row >> 1 & 3)) * 16; }

DEVICE u32 halves_within(float low, float high) { return halves(within_half(low), within_half(high)); }

// The logarithm of a gate to the base of two, in f64: of gates near one f32 has few digits, and they are summed. A gate below 2^-126 is taken
// as that.
DEVICE double log2_of_gate(float gate) {
    int bits = __float_as_int(fmaxf(gate, 1.17549435e-38f)), k = (bits - 0x3f3504f3) >> 23;
    return (double)k + log1p_((double)__int_as_float(bits - (k << 23)) - 1.0) * 1.4426950408889634074;
}

// What chunks are before they meet a state: a block a chunk and a key head, whose value heads go two at a time.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 3) fast_rule_chunks(const Rule p) {
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3, kh = blockIdx.x, chunk = blockIdx.y, tile = chunk;
    wait_for_earlier();
    Run run;
    if (!run_of_tile(p.step, RULE_ROWS, tile, run)) return;
    u32 first = run.first + tile * RULE_ROWS, rows = run.rows - tile * RULE_ROWS < RULE_ROWS ? run.rows - tile * RULE_ROWS : RULE_ROWS;
    u32 base = (u32)__cvta_generic_to_shared(shared);
    // Keys and queries, later two heads' T; two heads' A by columns; sums of gates, what they fall short of as floats, and beta; a sum of halves.
    float *inverse = (float *)shared, *columns = (float *)(shared + RULE_OF_KEYS);
    float4 *gates = (float4 *)(columns + 2 * RULE_ROWS * CHUNK_STRIDE);
    double *halfway = (double *)(gates + 2 * RULE_ROWS);
    u8 *keys = rule_keys(p, chunk, kh);
#pragma unroll 4
    for (u32 u = t; u < 2 * RULE_ROWS * (RULE_DIM / 8); u += CHUNK_THREADS) {
        u32 which = u / (RULE_ROWS * RULE_DIM / 8), row = u / (RULE_DIM / 8) % RULE_ROWS, piece = u % (RULE_DIM / 8);
        uint4 put = make_uint4(0, 0, 0, 0);
        if (row < rows) {
            const float4 *x = (const float4 *)(at<float>(which ? p.q : p.k, first + row, kh) + piece * 8);
            float4 a = x[0], b = x[1];
            put = make_uint4(halves_within(a.x, a.y), halves_within(a.z, a.w), halves_within(b.x, b.y), halves_within(b.z, b.w));
        }
        u32 to = which * RULE_KEYS + place_256(row, piece);
        *(uint4 *)(shared + to) = put;
        *(uint4 *)(keys + to) = put;
    }
    __syncthreads();
    // Products of keys with keys, of sixteen rows, and of queries with keys, of sixteen others, so that every warp has as many of them.
    u32 of_a = warp * 16, of_p = 48 - of_a, a_row = lane & 15, a_piece = lane >> 4, k_row = (lane & 7) + (lane >> 4) * 8, k_piece = lane >> 3 & 1;
    float kk[8][4], qk[8][4];
#pragma unroll
    for (u32 j = 0; j < 8; j++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) kk[j][e] = qk[j][e] = 0.0f;
#pragma unroll
    for (u32 d = 0; d < RULE_DIM / 16; d++) {
        u32 a[4], q[4];
        load_matrices(a, base + place_256(of_a + a_row, d * 2 + a_piece));
        load_matrices(q, base + RULE_KEYS + place_256(of_p + a_row, d * 2 + a_piece));
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 b[4];
            load_matrices(b, base + place_256(j * 16 + k_row, d * 2 + k_piece));
            if (j * 16 <= of_a) {
                multiply_halves(kk[2 * j], a, b[0], b[1]);
                multiply_halves(kk[2 * j + 1], a, b[2], b[3]);
            }
            if (j * 16 <= of_p) {
                multiply_halves(qk[2 * j], q, b[0], b[1]);
                multiply_halves(qk[2 * j + 1], q, b[2], b[3]);
            }
        }
    }
    u32 per = p.v_heads / p.k_heads, own = warp >> 1, row = t & 63;
    auto value_head = [&](u32 n) { return p.tiled ? n * p.k_heads + kh : kh * per + n; };
    for (u32 n = 0; n < per; n += 2) {
        u32 heads = per - n < 2 ? per - n : 2;
        bool there = row < rows && own < heads;
        u32 head = value_head(n + (own < heads ? own : 0));
        double sum = there ? log2_of_gate(at<float>(p.decay, first + row, 0)[head]) : 0.0;
        float beta = there ? at<float>(p.beta, first + row, 0)[head] : 0.0f;
#pragma unroll
        for (u32 by = 1; by < 32; by *= 2) {
            double before = __shfl_up_sync(FULL, sum, by);
            if (lane >= by) sum += before;
        }
        if (row == 31) halfway[own] = sum;
        __syncthreads();
        if (row >= 32) sum += halfway[own];
        float high = (float)sum;
        gates[own * RULE_ROWS + row] = make_float4(high, (float)(sum - (double)high), beta, 0.0f);
        __syncthreads();
        auto between = [](const float4 &from, const float4 &to) { return power((to.x - from.x) + (to.y - from.y)); };
        if (own < heads) {
            const float4 &now = gates[own * RULE_ROWS + row];
            float4 *to = (float4 *)(rule_values(p, chunk, head) + 2 * RULE_SQUARE);
            to[row] = make_float4(beta, power(high), between(now, gates[own * RULE_ROWS + RULE_ROWS - 1]), 0.0f);
        }
        for (u32 h = 0; h < heads; h++) {
            const float4 *of = gates + h * RULE_ROWS;
            float *a = columns + h * RULE_ROWS * CHUNK_STRIDE;
            u8 *weights = rule_values(p, chunk, value_head(n + h)) + RULE_SQUARE;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 i = of_a + half * 8 + g, q = of_p + half * 8 + g;
                float4 of_i = of[i], of_q = of[q];
#pragma unroll
                for (u32 j8 = 0; j8 < 8; j8++) {
                    u32 j = j8 * 8 + quad * 2;
                    float4 of_j = of[j], after = of[j + 1];
                    // Exponents of what is not wanted may be above zero, and are not made.
                    if (j8 / 2 * 16 <= of_a) {
                        a[j * CHUNK_STRIDE + i] = j < i ? of_i.z * between(of_j, of_i) * kk[j8][2 * half] : 0.0f;
                        a[(j + 1) * CHUNK_STRIDE + i] = j + 1 < i ? of_i.z * between(after, of_i) * kk[j8][2 * half + 1] : 0.0f;
                    }
                    if (j8 / 2 * 16 <= of_p) {
                        float x = j <= q ? between(of_j, of_q) * qk[j8][2 * half] : 0.0f;
                        float y = j + 1 <= q ? between(after, of_q) * qk[j8][2 * half + 1] : 0.0f;
                        *(u32 *)(weights + place_128(q, j8) + quad * 4) = halves_within(x, y);
                    }
                }
            }
        }
        __syncthreads();
        // A thread a column of T, which it alone reads and writes, sixteen rows at a time: what rows before them add, then the rows themselves.
        // A warp begins where its first column has anything.
        if (own < heads) {
            const float *a = columns + own * RULE_ROWS * CHUNK_STRIDE;
            float *x = inverse + own * RULE_ROWS * RULE_ROWS + row;
            u32 begin = row & 32;
#pragma unroll 1
            for (u32 i0 = begin; i0 < RULE_ROWS; i0 += 16) {
                float acc[16];
#pragma unroll
                for (u32 i = 0; i < 16; i++) acc[i] = i0 + i == row ? 1.0f : 0.0f;
                auto take = [&](u32 j, u32 from, float by) {
#pragma unroll
                    for (u32 i = 0; i < 16; i += 4) {
                        if (i + 3 < from) continue;
                        float4 of = *(const float4 *)(a + j * CHUNK_STRIDE + i0 + i);
                        if (i >= from) acc[i] = fmaf(-of.x, by, acc[i]);
                        if (i + 1 >= from) acc[i + 1] = fmaf(-of.y, by, acc[i + 1]);
                        if (i + 2 >= from) acc[i + 2] = fmaf(-of.z, by, acc[i + 2]);
                        acc[i + 3] = fmaf(-of.w, by, acc[i + 3]);
                    }
                };
#pragma unroll 4
                for (u32 j = begin; j < i0; j++) take(j, 0, x[j * RULE_ROWS]);
#pragma unroll
                for (u32 i = 0; i < 16; i++) {
                    x[(i0 + i) * RULE_ROWS] = acc[i];
                    if (i < 15) take(i0 + i, i + 1, acc[i]);
                }
            }
        }
        __syncthreads();
        for (u32 u = t; u < heads * (RULE_SQUARE / 16); u += CHUNK_THREADS) {
            u32 h = u / (RULE_SQUARE / 16), i = u / 8 % RULE_ROWS, piece = u % 8;
            if (piece / 2 > i / 16) continue;
            const float4 *from = (const float4 *)(inverse + (h * RULE_ROWS + i) * RULE_ROWS + piece * 8);
            float4 low = from[0], high = from[1];
            *(uint4 *)(rule_values(p, chunk, value_head(n + h)) + place_128(i, piece)) =
                make_uint4(halves_within(low.x, low.y), halves_within(low.z, low.w), halves_within(high.x, high.y), halves_within(high.z, high.w));
        }
        __syncthreads();
    }
}

// From chunk to chunk: a block a run's 32 columns of a head. Of eight warps each has sixteen rows of the state, and sixteen rows by sixteen
// columns of whatever a chunk's rows have. Shared memory: three stages of chunks, the state as halves, R, and d as it is and as the state takes
// it.
extern "C" __global__ void __launch_bounds__(RULE_THREADS, 1) fast_rule(const Rule p) {
    u32 t = threadIdx.x, warp = t >> 5, lane = t & 31, g = lane >> 2, quad = lane & 3, head = blockIdx.y;
    wait_for_earlier();
    if (blockIdx.z >= p.step.head[0]) return;
    Run run = p.step.runs[blockIdx.z];
    u32 chunks = (run.rows + RULE_ROWS - 1) / RULE_ROWS, chunk0 = 0;
    for (u32 r = 0; r < blockIdx.z; r++) chunk0 += (p.step.runs[r].rows + RULE_ROWS - 1) / RULE_ROWS;
    u32 kh = p.tiled ? head % p.k_heads : head / (p.v_heads / p.k_heads), column0 = blockIdx.x * RULE_COLUMNS;
    u32 base = (u32)__cvta_generic_to_shared(shared), state_at = RULE_STAGES * RULE_STAGE, r_at = state_at + RULE_STATE;
    u32 d_at = r_at + RULE_PART, late_at = d_at + RULE_PART;
    auto bring = [&](u32 c) {
        const u8 *keys = rule_keys(p, chunk0 + c, kh), *values = rule_values(p, chunk0 + c, head);
        u32 to = base + c % RULE_STAGES * RULE_STAGE + 16 * t;
#pragma unroll
        for (u32 u = 0; u < RULE_OF_KEYS; u += 16 * RULE_THREADS) copy_ahead<16>(to + u, keys + u + 16 * t);
        to += RULE_OF_KEYS;
#pragma unroll
        for (u32 u = 0; u < 2 * RULE_SQUARE; u += 16 * RULE_THREADS) {
            // Sixteens above the diagonal are not there.
            u32 row = (u + 16 * t) / 128 % RULE_ROWS, piece = t % 8 ^ (row & 7);
            if (piece / 2 <= row / 16) copy_ahead<16>(to + u, values + u + 16 * t);
        }
        if (t < RULE_GATES / 16) copy_ahead<16>(to + 2 * RULE_SQUARE, values + 2 * RULE_SQUARE + 16 * t);
    };
    u32 third = warp & 3, m0 = third * 16, n0 = (warp >> 2) * 16, a_row = lane & 15, a_piece = lane >> 4, part = n0 / 8;
    // A lane's values of a chunk: rows g and g + 8 of the warp's sixteen, two pairs of columns.
    float2 v[2][2];
    auto ask = [&](u32 c) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 row = c * RULE_ROWS + m0 + h * 8 + g;
            const float *from = at<float>(p.v, run.first + row, head) + column0 + n0 + quad * 2;
#pragma unroll
            for (u32 j = 0; j < 2; j++) v[h][j] = row < run.rows ? *(const float2 *)(from + j * 8) : make_float2(0.0f, 0.0f);
        }
    };
    bring(0);
    copies_end();
    if (chunks > 1) bring(1);
    copies_end();
    ask(0);
    float s[4][4];
    u64 own = head * p.state.row + (warp * 16 + g) * (u64)p.state.head + column0 + quad * 2;
    auto keep = [&]() {
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                *(u32 *)(shared + state_at + place_64(warp * 16 + h * 8 + g, j) + quad * 4) = halves_within(s[j][2 * h], s[j][2 * h + 1]);
    };
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float2 x = *(const float2 *)((const float *)(p.state.at + run.from) + own + h * 8 * (u64)p.state.head + j * 8);
            s[j][2 * h] = x.x;
            s[j][2 * h + 1] = x.y;
        }
    keep();
#pragma unroll 1
    for (u32 c = 0; c < chunks; c++) {
        copies_wait<1>();
        __syncthreads();
        if (c + 2 < chunks) bring(c + 2);
        copies_end();
        u32 stage = c % RULE_STAGES * RULE_STAGE, keys = base + stage, square = keys + RULE_OF_KEYS;
        const float4 *gates = (const float4 *)(shared + stage + RULE_OF_KEYS + 2 * RULE_SQUARE);
        // What the state has for keys, and gives queries.
        float ks[2][4], o[2][4];
#pragma unroll
        for (u32 j = 0; j < 2; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) ks[j][e] = o[j][e] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < RULE_DIM / 16; d++) {
            u32 k[4], q[4], b[4];
            load_matrices(k, keys + place_256(m0 + a_row, d * 2 + a_piece));
            load_matrices(q, keys + RULE_KEYS + place_256(m0 + a_row, d * 2 + a_piece));
            load_turned(b, base + state_at + place_64(d * 16 + a_row, part + a_piece));
            multiply_halves(ks[0], k, b[0], b[1]);
            multiply_halves(ks[1], k, b[2], b[3]);
            multiply_halves(o[0], q, b[0], b[1]);
            multiply_halves(o[1], q, b[2], b[3]);
        }
        float4 gate[2] = {gates[m0 + g], gates[m0 + 8 + g]};
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                float x = gate[h].x * fmaf(-gate[h].y, ks[j][2 * h], v[h][j].x), y = gate[h].x * fmaf(-gate[h].y, ks[j][2 * h + 1], v[h][j].y);
                *(u32 *)(shared + r_at + place_64(m0 + h * 8 + g, part + j) + quad * 4) = halves_within(x, y);
                o[j][2 * h] *= gate[h].y;
                o[j][2 * h + 1] *= gate[h].y;
            }
        if (c + 1 < chunks) ask(c + 1);
        __syncthreads();
        // d, and d as it is at the chunk's end.
        float d[2][4];
#pragma unroll
        for (u32 j = 0; j < 2; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) d[j][e] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (k > third) continue;
            u32 a[4], b[4];
            load_matrices(a, square + place_128(m0 + a_row, k * 2 + a_piece));
            load_turned(b, base + r_at + place_64(k * 16 + a_row, part + a_piece));
            multiply_halves(d[0], a, b[0], b[1]);
            multiply_halves(d[1], a, b[2], b[3]);
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 to = place_64(m0 + h * 8 + g, part + j) + quad * 4;
                *(u32 *)(shared + d_at + to) = halves_within(d[j][2 * h], d[j][2 * h + 1]);
                *(u32 *)(shared + late_at + to) = halves_within(gate[h].z * d[j][2 * h], gate[h].z * d[j][2 * h + 1]);
            }
        __syncthreads();
        float decay = gates[RULE_ROWS - 1].y;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[j][e] *= decay;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 a[4], b[4];
            load_turned(a, keys + place_256(k * 16 + (lane & 7) + (lane >> 4) * 8, warp * 2 + (lane >> 3 & 1)));
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                load_turned(b, base + late_at + place_64(k * 16 + a_row, j * 2 + a_piece));
                multiply_halves(s[2 * j], a, b[0], b[1]);
                multiply_halves(s[2 * j + 1], a, b[2], b[3]);
            }
        }
        keep();
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (k > third) continue;
            u32 a[4], b[4];
            load_matrices(a, square + RULE_SQUARE + place_128(m0 + a_row, k * 2 + a_piece));
            load_turned(b, base + d_at + place_64(k * 16 + a_row, part + a_piece));
            multiply_halves(o[0], a, b[0], b[1]);
            multiply_halves(o[1], a, b[2], b[3]);
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 row = c * RULE_ROWS + m0 + h * 8 + g;
            if (row >= run.rows) continue;
            float *out = at<float>(p.out, run.first + row, head) + column0 + n0 + quad * 2;
#pragma unroll
            for (u32 j = 0; j < 2; j++) *(float2 *)(out + j * 8) = make_float2(o[j][2 * h], o[j][2 * h + 1]);
        }
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            *(float2 *)((float *)(p.state.at + run.to) + own + h * 8 * (u64)p.state.head + j * 8) = make_float2(s[j][2 * h], s[j][2 * h + 1]);
}
