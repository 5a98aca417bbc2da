// A mixture of experts for one row, in three kernels: the router's scores, with the shared expert's gate and up beside them; gate and up of
// the chosen experts; down, with everything that is added. A row is of 2,048 values and an expert's inner one of 512; four bits in groups of
// 64 with BF16 parameters, eight for the router.
//
// Who needs the choice makes it from the scores: every block of the second kernel as soon as they are there, and those of the third before their
// wait, so that their weights are on their way while the second still computes.

enum { MOST_EXPERTS = 512, MOST_CHOSEN = 16, EXPERT_INNER = 512, EXPERT_SLOTS = 12 };

// The experts that a router's scores choose, and their weights: softmax, then top_k. All threads of a block of WARPS call it; one warp ranks.
//
// It ranks but those whose exponential is at least (almost) the k-th largest of the lanes' largest: none of the others is among the chosen.
// Where exponentials are so small, or no numbers, that this may not hold, it ranks all. Short on purpose: every instruction is fetched for it.
template <int WARPS> DEVICE void choose_experts(const float *scores, u32 experts, u32 k, bool renorm, u32 *ids, float *weights) {
    constexpr u32 THREADS = 32 * WARPS, EACH = MOST_EXPERTS / THREADS, N = MOST_EXPERTS / 32;
    __shared__ __align__(16) float of_warps[WARPS], exps[MOST_EXPERTS];
    __shared__ __align__(16) u32 keys[MOST_EXPERTS + 4];
    __shared__ u32 who[MOST_EXPERTS];
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float x[EACH], m = __int_as_float(0xff800000);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) x[i] = threadIdx.x + i * THREADS < experts ? scores[threadIdx.x + i * THREADS] : m;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) m = fmaxf(m, x[i]);
    m = warp_max(m);
    if (lane == 0) of_warps[warp] = m;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < WARPS; w += 4) {
        float4 four = *(const float4 *)(of_warps + w);
        m = fmaxf(m, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++) exps[threadIdx.x + i * THREADS] = threadIdx.x + i * THREADS < experts ? exp_(x[i] - m) : -1.0f;
    __syncthreads();
    if (warp == 0) {
        float own[N], acc = 0.0f, top = 0.0f;
#pragma unroll
        for (u32 j = 0; j < N; j++) own[j] = exps[j * 32 + lane];
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            if (j * 32 < experts) acc += own[j];
            top = fmaxf(top, own[j]);
        }
        float sum = fold(acc);
        // Lanes' largest as different numbers, in their order but for the last bits.
        u32 key = (__float_as_uint(top) & ~31u) + 31 - lane, rank = 0, n = 0;
#pragma unroll 8
        for (u32 d = 0; d < 32; d++) rank += __shfl_sync(FULL, key, d) > key ? 1 : 0;
        float least = __shfl_sync(FULL, top, 31 - __clz(__ballot_sync(FULL, rank == k - 1))) * 0.9999f;
        bool all = !(sum < __int_as_float(0x7f800000)) || !(least > 1e-30f);
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            bool in = j * 32 < experts && (all || own[j] >= least);
            u32 those = __ballot_sync(FULL, in);
            if (in) who[n + __popc(those & ((1u << lane) - 1))] = j * 32 + lane;
            n += __popc(those);
        }
        __syncwarp();
        // Probabilities are ordered as their bits are; a NaN comes last. Past the end there are some that come after all.
#pragma unroll 1
        for (u32 i = lane; i < n; i += 32) {
            float p = exps[who[i]] / sum;
            keys[i] = p == p ? __float_as_uint(p) + 1 : 0;
            exps[who[i]] = p;
        }
        if (lane < 4) keys[n + lane] = 0;
        __syncwarp();
#pragma unroll 1
        for (u32 i = lane; i < n; i += 32) {
            u32 mine = keys[i], before = 0;
#pragma unroll 2
            for (u32 j = 0; j < n; j += 4) {
                uint4 four = *(const uint4 *)(keys + j);
                before += four.x + (j < i ? 1 : 0) > mine ? 1 : 0;
                before += four.y + (j + 1 < i ? 1 : 0) > mine ? 1 : 0;
                before += four.z + (j + 2 < i ? 1 : 0) > mine ? 1 : 0;
                before += four.w + (j + 3 < i ? 1 : 0) > mine ? 1 : 0;
            }
            if (before < k) {
                ids[before] = who[i];
                weights[before] = exps[who[i]];
            }
        }
        __syncwarp();
        if (renorm) {
            float total = 0.0f, mine = weights[lane % MOST_CHOSEN];
#pragma unroll
            for (u32 j = 0; j < MOST_CHOSEN; j++)
                if (j < k) total += __shfl_sync(FULL, mine, j);
            if (lane < k) weights[lane] = mine / total;
        }
    }
    __syncthreads();
}

// The router, and gate and up of the shared expert.
struct RouteIn {
    // The row, its norm, and the shared expert's planes and result; `outputs` is 0 without one.
    RowProduct row;
    // The router's planes, and where its scores go.
    u64 w, s, b, scores;
    // Where the row's int8 form goes.
    u64 codes, scales, sums;
    // Bytes from a row of codes, and of parameters, to the next, and the number of scores.
    u32 w_row, s_row, outputs, unused;
};

// The first blocks have eight pairs of the shared expert each, the others eight scores.
//
// Shared memory: as a row's product has it, of 16 outputs.
extern "C" __global__ void __launch_bounds__(256) route_2(const RouteIn p) {
    constexpr u32 CHUNKS = 2, GROUPS = 16 * CHUNKS;
    float4 *room;
    RowStaged x = row_staged<CHUNKS>(room);
    RowFolds<GROUPS> folds = row_folds<GROUPS>(room, 2 * ROW_WARPS);
    u32 warp = threadIdx.x >> 5, pairs = p.row.outputs / 16, t = threadIdx.x;
    bool scores = blockIdx.x >= pairs;
    u32 first = (scores ? blockIdx.x - pairs : blockIdx.x) * ROW_WARPS, out = first + warp;
    RowWeights<4, 2, CHUNKS> pair;
    RowWeights<8, 1, CHUNKS> score;
    if (scores) {
        row_ask(score, [&](u32) {
            u64 row = out < p.outputs ? out : p.outputs - 1, params = row * p.s_row;
            return RowAt{(const u8 *)p.w + row * p.w_row, (const u8 *)p.s + params, (const u8 *)p.b + params};
        });
    } else {
        row_ask(pair, [&](u32 o) {
            u64 row = o * (p.row.outputs / 2) + out, params = row * p.row.s_row;
            return RowAt{(const u8 *)p.row.w + row * p.row.w_row, (const u8 *)p.row.s + params, (const u8 *)p.row.b + params};
        });
    }
    uint2 factors[CHUNKS];
    row_factors<CHUNKS>(p.row, factors);
    wait_for_earlier();
    row_stage<CHUNKS, true>(p.row, factors, x, (float *)room, blockIdx.x == 0);
    __syncthreads();
    if (scores) row_dots(score, x, folds, warp);
    else row_dots(pair, x, folds, 2 * warp);
    if (blockIdx.x == 0) {
        if (t < 64 * CHUNKS) ((uint4 *)p.codes)[t] = ((const uint4 *)x.codes)[t];
        if (t < GROUPS) {
            ((float *)p.scales)[t] = x.scales[t];
            ((float *)p.sums)[t] = x.sums[t];
        }
    }
    __syncthreads();
    if (t >= 32) return;
    float acc = row_fold(folds, t % 16, x.scales, x.sums);
    float second = __shfl_xor_sync(FULL, acc, 1);
    if (scores) {
        if (t < ROW_WARPS && first + t < p.outputs) ((float *)p.scores)[first + t] = acc;
    } else if (t < 16 && !(t & 1)) {
        ((float *)p.row.out)[first + t / 2] = silu_(acc) * second;
    }
}

// Gate and up of the chosen experts.
struct ExpertsIn {
    // The planes of gate and up, and bytes from an expert's codes, and parameters, to the next's.
    u64 gate_w, gate_s, gate_b, up_w, up_s, up_b, w_expert, s_expert;
    // The row's int8 form, the router's scores, the result.
    u64 codes, scales, sums, scores, out;
    // Elements from a slot of the result to the next.
    u32 w_row, s_row, experts, k, out_slot, unused;
};

// A warp has OUT of the chosen experts' rows, of gate and up in turns: pairs of slot after slot, so a block may have pairs of two experts. Blocks
// are as large as those of the next kernel, so that one of each fits on a multiprocessor, and spread over as many multiprocessors as there are
// blocks: ten experts' pairs are 128 blocks of 40, where blocks of 32 would be 28 more than there are multiprocessors.
//
// Shared memory: as a row's product has it, of 16 * OUT outputs.
template <int OUT> DEVICE void experts_in(const ExpertsIn &p) {
    constexpr u32 CHUNKS = 2, GROUPS = 16 * CHUNKS, OUTS = 16 * OUT;
    __shared__ u32 ids[MOST_CHOSEN];
    __shared__ float weights[MOST_CHOSEN];
    float4 *room;
    RowStaged x = row_staged<CHUNKS>(room);
    RowFolds<GROUPS> folds = row_folds<GROUPS>(room, OUTS);
    u32 warp = threadIdx.x >> 5, t = threadIdx.x, first = blockIdx.x * OUTS;
    wait_for_earlier();
    // Sums follow the scales.
    if (t < 64 * CHUNKS) ((uint4 *)x.codes)[t] = ((const uint4 *)p.codes)[t];
    else if (t < 64 * CHUNKS + 2 * GROUPS) x.scales[t - 64 * CHUNKS] = ((const float *)(t < 64 * CHUNKS + GROUPS ? p.scales : p.sums))[t % GROUPS];
    choose_experts<16>((const float *)p.scores, p.experts, p.k, false, ids, weights);
    RowWeights<4, OUT, CHUNKS> w;
    row_ask(w, [&](u32 o) {
        u32 r = first + warp * OUT + o, pair = r / 2;
        u64 expert = ids[pair / EXPERT_INNER], row = pair % EXPERT_INNER;
        u64 code = expert * p.w_expert + row * p.w_row, params = expert * p.s_expert + row * p.s_row;
        if (r & 1) return RowAt{(const u8 *)p.up_w + code, (const u8 *)p.up_s + params, (const u8 *)p.up_b + params};
        return RowAt{(const u8 *)p.gate_w + code, (const u8 *)p.gate_s + params, (const u8 *)p.gate_b + params};
    });
    row_dots(w, x, folds, warp * OUT);
    __syncthreads();
    // Whole warps.
    if (t >= (OUTS + 31) / 32 * 32) return;
    float acc = row_fold(folds, t < OUTS ? t : 0, x.scales, x.sums);
    float second = __shfl_xor_sync(FULL, acc, 1);
    u32 pair = (first + t) / 2;
    if (t < OUTS && !(t & 1)) ((float *)p.out)[(u64)(pair / EXPERT_INNER) * p.out_slot + pair % EXPERT_INNER] = silu_(acc) * second;
}
extern "C" __global__ void __launch_bounds__(512, 2) experts_in_2(const ExpertsIn p) { experts_in<4>(p); }
extern "C" __global__ void __launch_bounds__(512, 2) experts_in_5(const ExpertsIn p) { experts_in<5>(p); }

// Down of the chosen experts and of the shared one, their sum, and what is added to it.
struct ExpertsOut {
    // The planes of the experts and of the shared one, which is 0 where there is none.
    u64 w, s, b, w_expert, s_expert, shared_w, shared_s, shared_b;
    // What the experts' gates and the shared one's let through; the scores, and that of the shared expert if it has one; what is added; the result.
    u64 x, shared_x, scores, gate, add, out;
    u32 w_row, s_row, shared_w_row, shared_s_row, x_slot, experts, k, renorm;
};

// A warp for an output, half of one for a slot; the shared expert is the slot after the chosen ones.
//
// Shared memory: [12][512] codes, [12][8] scales, sums, what the folds of 16 outputs with 12 slots take.
extern "C" __global__ void __launch_bounds__(512, 2) experts_out(const ExpertsOut p) {
    constexpr u32 GROUPS = EXPERT_INNER / ROW_GROUP, TURNS = EXPERT_SLOTS / 2, LOTS = EXPERT_SLOTS * GROUPS / 32;
    __shared__ u32 ids[MOST_CHOSEN];
    __shared__ float weights[MOST_CHOSEN];
    RowStaged x;
    x.codes = (i8 *)shared;
    x.scales = (float *)(shared + EXPERT_SLOTS * EXPERT_INNER);
    x.sums = x.scales + EXPERT_SLOTS * GROUPS;
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = lane / 16, unit = lane % 16, k = p.k;
    u32 out = blockIdx.x * 16 + warp, slots = k + (p.shared_w ? 1 : 0);
    typedef RowFolds<GROUPS> Folds;
    Folds folds = row_folds<GROUPS>((float4 *)(x.sums + EXPERT_SLOTS * GROUPS), 16 * EXPERT_SLOTS);
    // The scores are of the kernel before the last.
    choose_experts<16>((const float *)p.scores, p.experts, k, p.renorm, ids, weights);
    // Where the output's row for a slot is.
    auto at = [&](u32 slot) {
        bool chosen = slot < k;
        u64 expert = ids[chosen ? slot : 0];
        u64 code = chosen ? expert * p.w_expert + (u64)out * p.w_row : (u64)out * p.shared_w_row;
        u64 params = chosen ? expert * p.s_expert + (u64)out * p.s_row : (u64)out * p.shared_s_row;
        return RowAt{(const u8 *)(chosen ? p.w : p.shared_w) + code, (const u8 *)(chosen ? p.s : p.shared_s) + params,
                     (const u8 *)(chosen ? p.b : p.shared_b) + params};
    };
    uint4 raw[TURNS], params;
#pragma unroll
    for (u32 i = 0; i < TURNS; i++)
        if (2 * i + half < slots) raw[i] = *((const uint4 *)at(2 * i + half).w + unit);
    // A slot's scales are sixteen bytes, and so are its biases.
    if (lane < 2 * slots) params = *(const uint4 *)(lane & 1 ? at(lane / 2).b : at(lane / 2).s);
    float open = p.gate ? sigmoid_(*(const float *)p.gate) : 1.0f;
    wait_for_earlier();
    float added = p.add ? ((const float *)p.add)[out] : 0.0f;
    // Sixteen lanes a group, 32 groups at a time.
    u32 first = threadIdx.x / 16;
    float4 v[LOTS];
#pragma unroll
    for (u32 c = 0; c < LOTS; c++) {
        u32 group = first + c * 32, slot = group / GROUPS;
        const float *from = slot < k ? (const float *)p.x + (u64)slot * p.x_slot : (const float *)p.shared_x;
        v[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (slot < slots) v[c] = *(const float4 *)(from + group % GROUPS * ROW_GROUP + unit * 4);
    }
    row_codes<LOTS>(v, x.codes + first * ROW_GROUP + unit * 4, 32 * ROW_GROUP, x.scales + first, x.sums + first, 32);
    __syncthreads();
    u32 mine = warp * EXPERT_SLOTS;
    if (lane < 2 * slots) folds.params[(mine + lane / 2) * Folds::PARAMS + lane % 2] = params;
#pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        u32 slot = 2 * i + half;
        const uint4 *codes = (const uint4 *)(x.codes + slot * EXPERT_INNER) + 2 * unit;
        int d = row_dot<4>(raw + i, codes[0], codes[1]);
        d += __shfl_xor_sync(FULL, d, 1);
        if (!(lane & 1)) folds.dots[(mine + slot) * Folds::DOTS + unit / 2] = (float)d;
    }
    __syncwarp();
    // A lane folds a slot; all take their sum, in order.
    u32 own = lane < slots ? lane : 0;
    float y = row_fold(folds, mine + own, x.scales + own * GROUPS, x.sums + own * GROUPS), acc = 0.0f;
#pragma unroll
    for (u32 j = 0; j < EXPERT_SLOTS; j++) {
        float of = __shfl_sync(FULL, y, j);
        if (j < k) acc = fmaf(of, weights[j], acc);
    }
    if (p.shared_w) acc = acc + __shfl_sync(FULL, y, k) * open;
    if (lane == 0) ((float *)p.out)[out] = p.add ? added + acc : acc;
}
