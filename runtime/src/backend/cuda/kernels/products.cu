// What the kernels of products share: what a product is, and which slots a tile of an expert's has.

// What the activations of a product are made from.
enum { STAGE_CODES = 0, STAGE_PLAIN = 1, STAGE_NORM = 2 };

struct Linear {
    // The planes of the weight, and bytes from one row, and one expert, to the next.
    u64 w, s, b;
    u64 w_row, s_row, b_row;
    u64 w_expert, s_expert, b_expert;
    u64 format;
    u32 inputs, outputs, rows, stage;
    // Codes, scales and sums (STAGE_CODES), or values; elements from row to row and from slot to slot.
    u64 x, xs, xsum;
    u64 x_row, x_slot, xs_row, xs_slot;
    // The second operand of a stage: the norm's weight, or what silu(x) is multiplied with.
    u64 y, y_row, y_slot;
    u32 y_dtype, eps, offset, unused;
    // The result, and what is added to it.
    u64 out, out_row, out_slot;
    u64 add, add_row;
    // What is added to x before the norm, the sum, and the normalised row, where they are wanted; 0 where not.
    u64 x2, x2_row, sum, sum_row, normed, normed_row;
    // Chosen experts: slots in order of experts, where each expert's begin; 0 if there are none.
    u64 order, starts;
    u32 k, experts, x_slots;
    // Whether values are held in shared memory while they are staged (one row), and whether outputs are pairs (o, o + outputs / 2) of which
    // silu(first) * second is kept.
    u32 flags;
};
enum { HELD = 1, PAIRS = 2 };

DEVICE u32 prmt(u32 a, u32 b, u32 s) { return __byte_perm(a, b, s); }

// With chosen experts: which expert's tile of SIZE slots this is. Gives how many slots it has, which are in `slots`; the expert is found[0].
template <u32 SIZE> DEVICE u32 find_tile(const Linear &p, u32 tile, u32 *slots, u32 *found) {
    u32 t = threadIdx.x, lane = t & 31;
    // A lane counts the tiles of its share of the experts.
    if (t < 32) {
        const u32 *starts = (const u32 *)p.starts;
        u32 all = p.rows * p.k, share = (p.experts + 31) / 32, begin = lane * share, end = begin + share, mine = 0;
        begin = begin < p.experts ? begin : p.experts;
        end = end < p.experts ? end : p.experts;
        if (lane == 0) found[2] = 0;
#pragma unroll 8
        for (u32 e = begin; e < end; e++) {
            u32 from = starts[e] < all ? starts[e] : all, to = starts[e + 1] < all ? starts[e + 1] : all;
            mine += to > from ? (to - from + SIZE - 1) / SIZE : 0;
        }
        u32 before = 0;
        for (u32 l = 0; l < 32; l++) {
            u32 other = __shfl_xor_sync(FULL, mine, l);
            if ((lane ^ l) < lane) before += other;
        }
        __syncwarp();
        if (tile >= before && tile < before + mine) {
            for (u32 e = begin; e < end; e++) {
                u32 from = starts[e] < all ? starts[e] : all, to = starts[e + 1] < all ? starts[e + 1] : all;
                u32 many = to > from ? (to - from + SIZE - 1) / SIZE : 0;
                if (tile < before + many) {
                    u32 first = from + (tile - before) * SIZE;
                    found[0] = e;
                    found[1] = first;
                    found[2] = to - first < SIZE ? to - first : SIZE;
                    break;
                }
                before += many;
            }
        }
    }
    __syncthreads();
    u32 n = found[2];
    if (t < n) {
        u32 s = ((const u32 *)p.order)[found[1] + t], all = p.rows * p.k;
        slots[t] = s < all ? s : all - 1;
    }
    __syncthreads();
    return n;
}
