// Products of one row with weights in GGUF's block formats: the short kernels of decode.cu, whose text this gives another way to read weights.
//
// A kernel takes up to three products of a row at once, each in a format of its own, since files give the matrices of a layer several: its blocks
// are of one product each, and make the row's int8 form in that one's groups. Codes are asked for as affine ones are; the parameters of a warp's
// rows come to shared memory by themselves, eight bytes a copy, and become scales and biases beside the dots.

// One of the products: planes and result, bytes from row to row of each plane, the format, and its blocks.
struct RowPart {
    u64 w, s, b, out;
    u32 w_row, s_row, b_row, outputs;
    u32 block, first, blocks, unused;
};

// `row` is a product of the same row whose planes and result are not used; of parts that are not there `first` is past all blocks.
struct RowBlocks {
    RowProduct row;
    u32 pairs, unused;
    RowPart parts[3];
};

// Of outputs of OUT a warp and 1,024 * CHUNKS inputs: the dots of groups, their scales and, where the format has minimums, biases of each output,
// and the parameters of the warp's rows as they are stored, plane after plane.
template <int BLOCK> struct RowBlock {
    enum { GROUP = BLOCK == Q6_K ? 16 : 32, MINIMUMS = BLOCK == Q4_K || BLOCK == Q5_K, LISTS = MINIMUMS ? 3 : 2, EACH = 32 / GROUP };
    // Bytes of the parameters of 1,024 weights in the two planes after the codes.
    enum { SCALES = MINIMUMS ? 48 : 64, SUPERS = MINIMUMS ? 16 : BLOCK == Q6_K ? 8 : 0, BYTES = SCALES + SUPERS, PIECE = 8 };
    typedef float4 Factor;
    template <int OUT, int CHUNKS> struct Asked {
        Codes<BLOCK> codes[OUT][CHUNKS];
    };
    // Sixteen bytes are over, so that eight outputs are read without two in one bank.
    template <int OUT, int CHUNKS> struct Folds {
        enum { GROUPS = 1024 / GROUP * CHUNKS, PITCH = LISTS * GROUPS + 4 };
        float *lists;
        u8 *params;
    };
    u32 third_row;
    bool pairs;

    template <int OUT, int CHUNKS, int WARPS> METHOD Folds<OUT, CHUNKS> folds(float4 *&room, u32) const {
        Folds<OUT, CHUNKS> to;
        to.params = (u8 *)room + (threadIdx.x >> 5) * (OUT * CHUNKS * BYTES);
        room += WARPS * OUT * CHUNKS * BYTES / 16;
        to.lists = (float *)room;
        return to;
    }

    // What was asked for before has been made use of by the whole warp.
    template <int OUT, int CHUNKS, class At> METHOD void ask(Asked<OUT, CHUNKS> &to, const Folds<OUT, CHUNKS> &folds, At at) const {
        constexpr u32 FIRST = CHUNKS * SCALES / PIECE, COPIES = CHUNKS * BYTES / PIECE;
        u32 lane = threadIdx.x & 31, into = (u32)__cvta_generic_to_shared(folds.params);
#pragma unroll
        for (u32 o = 0; o < OUT; o++) {
            const u8 *codes = at(o).w;
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) ask_codes(to.codes[o][c], codes, c * 32 + lane);
        }
#pragma unroll
        for (u32 i = lane; i < OUT * COPIES; i += 32) {
            RowAt row = at(i / COPIES);
            u32 piece = i % COPIES;
            copy_ahead<PIECE>(into + i * PIECE, piece < FIRST ? row.s + piece * PIECE : row.b + (piece - FIRST) * PIECE);
        }
        copies_end();
    }

    template <int OUT, int CHUNKS>
    METHOD void dots(const Asked<OUT, CHUNKS> &from, const RowStaged &x, const Folds<OUT, CHUNKS> &to, u32 first) const {
        typedef Folds<OUT, CHUNKS> F;
        u32 lane = threadIdx.x & 31;
        copies_wait<0>();
        __syncwarp();
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            u32 u = c * 32 + lane;
            uint4 a = ((const uint4 *)x.codes)[2 * u], e = ((const uint4 *)x.codes)[2 * u + 1];
#pragma unroll
            for (u32 o = 0; o < OUT; o++) {
                u32 q[8];
                unpack_block<BLOCK>(from.codes[o][c], 0, BLOCK, 0, q);
                int low = dot_16(q, a, false), high = dot_16(q + 4, e, false);
                const u8 *scales = to.params + o * (CHUNKS * BYTES);
                Params params;
                float scale[2], bias[2], *list = to.lists + (first + o) * F::PITCH + EACH * u;
                ask_params(params, BLOCK, scales, scales + CHUNKS * SCALES, u);
                params_of(params, BLOCK, u, scale, bias);
                if (GROUP == 16) {
                    *(float2 *)list = make_float2((float)low, (float)high);
                    *(float2 *)(list + F::GROUPS) = make_float2(scale[0], scale[1]);
                } else {
                    list[0] = (float)(low + high);
                    list[F::GROUPS] = scale[0];
                    if (MINIMUMS) list[2 * F::GROUPS] = bias[0];
                }
            }
        }
        __syncwarp();
    }

    // Without minimums a bias is the scale's, as `params_of` has it.
    template <int OUT, int CHUNKS> METHOD float fold(const Folds<OUT, CHUNKS> &from, u32 output, const RowStaged &x) const {
        typedef Folds<OUT, CHUNKS> F;
        const float4 *dots = (const float4 *)(from.lists + output * F::PITCH), *scales = dots + F::GROUPS / 4, *biases = scales + F::GROUPS / 4;
        float acc = 0.0f, offset = block_offset(BLOCK);
#pragma unroll 2
        for (u32 i = 0; i < F::GROUPS / 4; i++) {
            float4 d = dots[i], s = scales[i], by = ((const float4 *)x.scales)[i], sum = ((const float4 *)x.sums)[i];
            float4 b = MINIMUMS ? biases[i] : make_float4(-(offset * s.x), -(offset * s.y), -(offset * s.z), -(offset * s.w));
            acc = fmaf(b.x, sum.x, fmaf(s.x * by.x, d.x, acc));
            acc = fmaf(b.y, sum.y, fmaf(s.y * by.y, d.y, acc));
            acc = fmaf(b.z, sum.z, fmaf(s.z * by.z, d.z, acc));
            acc = fmaf(b.w, sum.w, fmaf(s.w * by.w, d.w, acc));
        }
        return acc;
    }

    METHOD u64 third(u32 row, u64) const { return (u64)row * third_row; }
    METHOD bool are_pairs() const { return pairs; }
};

template <int BLOCK, int OUT, int CHUNKS, bool NORM> DEVICE void short_part(const RowProduct &p, const RowPart &part, bool pairs) {
    RowBlock<BLOCK> kind;
    kind.third_row = part.b_row;
    kind.pairs = pairs;
    row_product<OUT, CHUNKS, NORM, NORM ? TOLD_PAIRS : NO_PAIRS, NORM>(p, kind, blockIdx.x - part.first, part.blocks);
}

// With a norm outputs may be pairs, and a block goes on to further outputs; without one something may be added.
template <int OUT, int CHUNKS, bool NORM> DEVICE void short_blocks(const RowBlocks &p) {
    RowPart part = p.parts[0];
    if (NORM && blockIdx.x >= p.parts[1].first) part = p.parts[1];
    if (NORM && blockIdx.x >= p.parts[2].first) part = p.parts[2];
    RowProduct row = p.row;
    row.w = part.w, row.s = part.s, row.b = part.b, row.out = part.out;
    row.w_row = part.w_row, row.s_row = part.s_row, row.outputs = part.outputs;
    // Compared by order, which is no table of jumps: formats are numbered so.
    static_assert(Q4_0 < Q8_0 && Q8_0 < Q4_K && Q4_K < Q5_K && Q5_K < Q6_K, "in order");
    if (part.block < Q8_0) short_part<Q4_0, OUT, CHUNKS, NORM>(row, part, p.pairs);
    else if (part.block < Q4_K) short_part<Q8_0, OUT, CHUNKS, NORM>(row, part, p.pairs);
    else if (part.block < Q5_K) short_part<Q4_K, OUT, CHUNKS, NORM>(row, part, p.pairs);
    else if (part.block < Q6_K) short_part<Q5_K, OUT, CHUNKS, NORM>(row, part, p.pairs);
    else short_part<Q6_K, OUT, CHUNKS, NORM>(row, part, p.pairs);
}

#define SHORT_BLOCKS(name, out, chunks, norm, blocks)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, blocks) name(const RowBlocks p) { short_blocks<out, chunks, norm>(p); }
SHORT_BLOCKS(blocks_norm_1, 4, 1, true, 3)
SHORT_BLOCKS(blocks_norm_2, 2, 2, true, 3)
SHORT_BLOCKS(blocks_plain_1, 2, 1, false, 3)
SHORT_BLOCKS(blocks_plain_2, 1, 2, false, 3)
SHORT_BLOCKS(blocks_plain_3, 1, 3, false, 3)
SHORT_BLOCKS(blocks_plain_4, 1, 4, false, 3)
