// Attention of many rows on Hopper, for --fast: what fast.cu computes, by wgmma on halves.
//
// A tile is 128 queries, which are as many rows as have all query heads of one KV head; two warpgroups have 64 each. Queries are operands in
// registers. A third warpgroup brings keys and values, 64 positions at a time, as they lie in their caches: a row's 64 elements are 128 bytes,
// swizzled, and tensor cores read keys along them and values across. While a warpgroup makes weights of a chunk's scores, tensor cores
// multiply the weights of the chunk before with its values, and the queries with the keys of the chunk after: one group of products is on its way at
// a time, and none of its registers is touched until it has ended.
//
// There are as many blocks as multiprocessors; each takes tile after tile, the longest first, forth and back, so that all have as much. Keys of
// the next tile are brought while the last one ends.
//
// A query's weights are powers of its scores less a number that was its largest score when it last changed: it changes when a score is larger by more
// than eight powers of two, so that sums are seldom scaled.
//
// Other cards have kernels of these names that do nothing, and are never asked to run them.

#if __CUDA_ARCH__ >= 900
enum { FAST_STAGES = 4 };

// Products of 64 queries, or of their weights, with 64 or 128 columns, sixteen deep; the other side lies in shared memory, turned if its rows are
// what is summed over. Without MORE they begin at nothing.
template <bool TURNED, bool MORE> DEVICE void multiply_64(float *d, const u32 *a, u64 at) {
    asm volatile("{ .reg .pred more; setp.ne.b32 more, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
                 "%25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, more, 1, 1, %38; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
                   "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(at), "n"((int)MORE), "n"((int)TURNED));
}

template <bool TURNED, bool MORE> DEVICE void multiply_128(float *d, const u32 *a, u64 at) {
    asm volatile("{ .reg .pred more; setp.ne.b32 more, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
                 "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, more, 1, 1, %70; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
                   "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
                   "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
                   "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(at), "n"((int)MORE), "n"((int)TURNED));
}

// Keeps sums from being read before the wait.
template <int N> DEVICE void pin_sums(float *v) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}

// A tile of queries: its rows, where the first is, the first position of its first chunk, and chunks, of which there are at least two.
struct FastTile {
    u32 kvh, row0, rows, pos0, from, chunks;
    u64 cache;
};

// The block's tile in such a turn; false if it has none then.
DEVICE bool fast_tile(const Attend &p, u32 per_tile, u32 tiles, u32 turn, FastTile &to) {
    u32 u = turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (u >= tiles * p.kv_heads) return false;
    u32 tile = tiles - 1 - u / p.kv_heads;
    Run run;
    if (!run_of_tile(p.step, per_tile, tile, run)) return false;
    u32 first = tile * per_tile;
    to.kvh = u % p.kv_heads;
    to.rows = run.rows - first < per_tile ? run.rows - first : per_tile;
    to.row0 = run.first + first;
    to.pos0 = run.pos + first;
    to.from = first_seen(p, to.pos0) / FAST_KEYS * FAST_KEYS;
    to.chunks = (to.pos0 + to.rows - to.from + FAST_KEYS - 1) / FAST_KEYS;
    to.chunks = to.chunks < 2 ? 2 : to.chunks;
    to.cache = run.cache;
    return true;
}

// What a warp knows of its sixteen queries; a lane has two of them, eight apart.
template <int DIM> struct FastQueries {
    u32 q[DIM / 16][4];
    float acc[DIM / 2], base[2], sum[2], scale;
    // What each sees, and what all see.
    u32 sees_from[2], sees_to[2], all_from, all_to;
    // Descriptors of the first stage, and its barriers: keys there, keys free, values there, values free.
    u64 keys, values;
    u32 marks;

    static constexpr u32 CHUNK = FAST_KEYS * DIM * 2;

    METHOD u32 mark(u32 which, u32 n) const { return marks + 8 * (which * FAST_STAGES + n % FAST_STAGES); }
    METHOD void there(u32 which, u32 n) const { mark_wait(mark(which, n), n / FAST_STAGES & 1); }
    METHOD void free(u32 which, u32 n) const {
        if ((threadIdx.x & 31) == 0) mark_arrive(mark(which, n));
    }

    // Scores of chunk n.
    METHOD void scores(float *s, u32 n) {
        u64 at = keys + (n % FAST_STAGES) * (CHUNK / 16);
        multiply_64<false, false>(s, q[0], at);
#pragma unroll
        for (u32 d = 1; d < DIM / 16; d++) multiply_64<false, true>(s, q[d], at + (d / 4 * (FAST_KEYS * 128) + d % 4 * 32) / 16);
    }

    // Sums of the values of chunk n, with their weights.
    METHOD void sums(const u32 *w, u32 n) {
        u64 at = values + (n % FAST_STAGES) * (CHUNK / 16);
#pragma unroll
        for (u32 k = 0; k < FAST_KEYS / 16; k++) {
            if constexpr (DIM == 64) multiply_64<true, true>(acc, w + 4 * k, at + k * (16 * 128 / 16));
            else multiply_128<true, true>(acc, w + 4 * k, at + k * (16 * 128 / 16));
        }
    }

    // Weights of the scores of the chunk from position `start` on; gives whether sums are to be multiplied by these factors first.
    METHOD bool weigh(float *s, u32 *w, u32 start, float *factor) {
        const float none = __int_as_float(0xff800000);
        u32 quad = threadIdx.x & 3;
        if (start < all_from || start + FAST_KEYS > all_to) {
#pragma unroll
            for (u32 i = 0; i < 32; i++) {
                u32 pos = start + i / 4 * 8 + quad * 2 + (i & 1), h = i >> 1 & 1;
                if (pos < sees_from[h] || pos >= sees_to[h]) s[i] = none;
            }
        }
        float most[2];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float a = fmaxf(s[2 * h], s[2 * h + 1]), b = fmaxf(s[4 + 2 * h], s[5 + 2 * h]);
#pragma unroll
            for (u32 j = 2; j < 8; j += 2) {
                a = fmaxf(a, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
                b = fmaxf(b, fmaxf(s[4 * j + 4 + 2 * h], s[4 * j + 5 + 2 * h]));
            }
            most[h] = fmaxf(a, b);
        }
#pragma unroll
        for (u32 d = 1; d <= 2; d *= 2)
#pragma unroll
            for (u32 h = 0; h < 2; h++) most[h] = fmaxf(most[h], __shfl_xor_sync(FULL, most[h], d));
        // Of a query that has seen nothing yet the difference is no number, or not finite.
        bool grows = (most[0] - base[0]) * scale > 8.0f || (most[1] - base[1]) * scale > 8.0f;
        bool any = __ballot_sync(FULL, grows) != 0;
        if (any) {
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float now = fmaxf(base[h], most[h]);
                factor[h] = base[h] == none ? 0.0f : power((base[h] - now) * scale);
                base[h] = now;
                sum[h] *= factor[h];
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float shift = base[h] == none ? 0.0f : base[h] * scale, l[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 j = 0; j < 8; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float &x = s[4 * j + 2 * h + e];
                    x = power(fmaf(x, scale, -shift));
                    l[e] += x;
                }
            sum[h] += l[0] + l[1];
        }
#pragma unroll
        for (u32 k = 0; k < 16; k++) w[k] = halves(s[2 * k], s[2 * k + 1]);
        return any;
    }

    // A chunk's weights, `n` being its number, beside the scores of the next one and, but for the first, the sums of the one before.
    template <bool FIRST, bool LAST> METHOD void step(float *s, float *next, u32 *w, const u32 *before, u32 n, u32 start) {
        float factor[2] = {1.0f, 1.0f};
        if (!LAST) there(0, n + 1);
        if (!FIRST) there(2, n - 1);
        copies_seen();
        products_begin();
        if (!LAST) scores(next, n + 1);
        if (!FIRST) sums(before, n - 1);
        products_end();
        bool scaled = weigh(s, w, start, factor);
        products_wait();
        if (!LAST) {
            pin_sums<32>(next);
            free(1, n + 1);
        }
        if (!FIRST) {
            pin_sums<DIM / 2>(acc);
            free(3, n - 1);
            if (scaled) {
#pragma unroll
                for (u32 i = 0; i < DIM / 2; i++) acc[i] *= factor[i >> 1 & 1];
            }
        }
    }
};
#endif

// Shared memory: up to 1,024 bytes to begin at a multiple of that; stages of keys, [DIM / 64][64][64] halves each, then of values.
template <int DIM> DEVICE void fast_hopper(const Attend &p) {
#if __CUDA_ARCH__ >= 900
    constexpr u32 STAGES = FAST_STAGES, CHUNK = FAST_KEYS * DIM * 2, SIXTEENS = DIM / 8;
    __shared__ u64 marks[4 * STAGES];
    u32 t = threadIdx.x, lane = t & 31, warp = t >> 5 & 3, group = __shfl_sync(FULL, t >> 7, 0);
    u32 heads = p.heads / p.kv_heads, per_tile = FAST_QUERIES / heads;
    u32 mark = (u32)__cvta_generic_to_shared(marks);
    if (t == 0) {
#pragma unroll
        for (u32 i = 0; i < STAGES; i++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) mark_init(mark + 8 * (k * STAGES + i), k & 1 ? 8 : 128);
    }
    wait_for_earlier();
    u32 tiles = 0;
    for (u32 r = 0; r < p.step.head[0]; r++) tiles += (p.step.runs[r].rows + per_tile - 1) / per_tile;
    u32 turns = (tiles * p.kv_heads + gridDim.x - 1) / gridDim.x, base = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    __syncthreads();
    FastTile tile;
    // Chunks of tiles before.
    u32 n = 0;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        t &= 127;
        u32 piece = t % SIXTEENS, row = t / SIXTEENS;
        // Where a thread's first sixteen bytes lie; its next ones are of a row whose number is the same but for multiples of eight.
        u32 place = piece / 8 * (FAST_KEYS * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
#pragma unroll 1
        for (u32 turn = 0; turn < turns; turn++) {
            if (!fast_tile(p, per_tile, tiles, turn, tile)) continue;
            u32 to = tile.pos0 + tile.rows;
            auto bring = [&](const Operand &cache, u32 chunk, u32 number, u32 which) {
                u32 stage = number % STAGES, into = base + (which * STAGES + stage) * CHUNK + place;
                u32 pos = tile.from + chunk * FAST_KEYS + row;
                const u16 *first = (const u16 *)((const u8 *)cache.at + tile.cache) + tile.kvh * (u64)cache.head;
                const u16 *from = first + (pos * cache.row + piece * 8);
                if (number >= STAGES) mark_wait(mark + 8 * ((2 * which + 1) * STAGES + stage), (number / STAGES - 1) & 1);
#pragma unroll
                for (u32 i = 0; i < FAST_KEYS * SIXTEENS / 128; i++) {
                    bool there = pos + i * (128 / SIXTEENS) < to && piece * 8 < p.dim;
                    copy_or_zero(into + i * (128 / SIXTEENS) * 128, there ? from + i * (128 / SIXTEENS) * cache.row : first, there);
                }
                mark_copies(mark + 8 * (2 * which * STAGES + stage));
            };
#pragma unroll 1
            for (u32 c = 0; c <= tile.chunks; c++) {
                if (c < tile.chunks) bring(p.k, c, n + c, 0);
                if (c) bring(p.v, c - 1, n + c - 1, 1);
            }
            n += tile.chunks;
        }
        // Nothing is on its way when these end.
        copies_end();
        copies_wait<0>();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    u32 first = group * 64 + warp * 16, m0 = first + (lane >> 2), quad = lane & 3;
    FastQueries<DIM> mine;
    mine.marks = mark;
    // Scores are multiplied so that powers of two are what is wanted.
    mine.scale = __uint_as_float(p.scale) * 1.44269504088896340736f;
    // Rows of 128 bytes swizzled, 1,024 bytes from eight to the next eight; of values also how far 64 elements are from the next 64.
    u64 rows_of = (u64)1 << 62 | (u64)(1024 >> 4) << 32;
    mine.keys = rows_of | (u64)1 << 16 | (base & 0x3ffff) >> 4;
    mine.values = rows_of | (u64)(FAST_KEYS * 128 >> 4) << 16 | (base + STAGES * CHUNK & 0x3ffff) >> 4;
#pragma unroll 1
    for (u32 turn = 0; turn < turns; turn++) {
        if (!fast_tile(p, per_tile, tiles, turn, tile)) continue;
        u32 queries = tile.rows * heads;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 m = m0 + 8 * h, pos = tile.pos0 + m / heads;
            bool in = m < queries;
            u32 of = in ? m : 0;
            const float *x = at<float>(p.q, tile.row0 + of / heads, tile.kvh * heads + of % heads) + quad * 2;
            // All are asked for before any is waited for.
            float2 v[DIM / 8];
#pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) v[i] = *(const float2 *)(x + (i * 8 < p.dim ? i * 8 : 0));
#pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) {
                u32 both = halves(within_half(v[i].x), within_half(v[i].y));
                mine.q[i / 2][i % 2 * 2 + h] = in && i * 8 < p.dim ? both : 0;
            }
            mine.sees_from[h] = first_seen(p, pos);
            mine.sees_to[h] = m < queries ? pos + 1 : 0;
            mine.base[h] = __int_as_float(0xff800000);
            mine.sum[h] = 0.0f;
        }
        mine.all_from = first_seen(p, tile.pos0 + (first + 15) / heads);
        mine.all_to = tile.pos0 + first / heads + 1;
#pragma unroll
        for (u32 i = 0; i < DIM / 2; i++) mine.acc[i] = 0.0f;
        float a[32], b[32];
        u32 v[16], w[16], start = tile.from, end = n + tile.chunks - 1;
        mine.there(0, n);
        copies_seen();
        products_begin();
        mine.scores(a, n);
        products_end();
        products_wait();
        pin_sums<32>(a);
        mine.free(1, n);
        mine.template step<true, false>(a, b, v, w, n, start);
#pragma unroll 1
        while (true) {
            n++, start += FAST_KEYS;
            if (n == end) {
                mine.template step<false, true>(b, a, w, v, n, start);
                break;
            }
            mine.template step<false, false>(b, a, w, v, n, start);
            n++, start += FAST_KEYS;
            if (n == end) {
                mine.template step<false, true>(a, b, v, w, n, start);
#pragma unroll
                for (u32 k = 0; k < 16; k++) w[k] = v[k];
                break;
            }
            mine.template step<false, false>(a, b, v, w, n, start);
        }
        mine.there(2, n);
        copies_seen();
        products_begin();
        mine.sums(w, n);
        products_end();
        products_wait();
        pin_sums<DIM / 2>(mine.acc);
        mine.free(3, n);
        n++;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            float l = mine.sum[h];
            l += __shfl_xor_sync(FULL, l, 1);
            l += __shfl_xor_sync(FULL, l, 2);
            float inverse = 1.0f / l;
            u32 m = m0 + 8 * h, row = tile.row0 + m / heads, head = tile.kvh * heads + m % heads;
            bool there = m < queries;
#pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) {
                mine.acc[4 * i + 2 * h] *= inverse;
                mine.acc[4 * i + 2 * h + 1] *= inverse;
            }
            if (!p.codes) {
                float *out = at<float>(p.out, row, head) + quad * 2;
#pragma unroll
                for (u32 i = 0; i < DIM / 8; i++)
                    if (there && i * 8 < p.dim) *(float2 *)(out + i * 8) = make_float2(mine.acc[4 * i + 2 * h], mine.acc[4 * i + 2 * h + 1]);
                continue;
            }
            // The int8 form: four lanes have a group of 64.
#pragma unroll
            for (u32 c = 0; c < DIM / 64; c++) {
                const float *x = mine.acc + 32 * c + 2 * h;
                float most = 0.0f;
#pragma unroll
                for (u32 i = 0; i < 16; i++) most = fmaxf(most, fabsf(x[i / 2 * 4 + i % 2]));
                most = fminf(most, __uint_as_float(0x7f7fffffu));
                most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
                most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
                float by = 127.0f / most;
                int total = 0;
                u16 *codes = (u16 *)((u8 *)p.codes + ((u64)row * p.codes_row + head * p.dim + c * 64 + quad * 2));
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    u32 two = prmt(row_code(x[i * 4] * by), row_code(x[i * 4 + 1] * by), 0x0040);
                    total = dot_s8(two & 0xffff, 0x01010101, total);
                    if (there) codes[i * 4] = (u16)two;
                }
                total += __shfl_xor_sync(FULL, total, 1);
                total += __shfl_xor_sync(FULL, total, 2);
                if (there && quad == 0) {
                    u64 place = (u64)row * p.scales_row + (head * p.dim + c * 64) / ROW_GROUP;
                    float unit = most / 127.0f;
                    ((float *)p.scales)[place] = unit;
                    ((float *)p.sums)[place] = unit * (float)total;
                }
            }
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1) fast_hopper_64(const Attend p) { fast_hopper<64>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) fast_hopper_128(const Attend p) { fast_hopper<128>(p); }
