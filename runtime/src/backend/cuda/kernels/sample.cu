// A token drawn where the logits are: the sampler of runtime/src/sample.rs to the bit. Weights are shares of 2^-39, whole numbers whose sums are
// exact in any order, so that a block, a bucket or a thread may sum them as it comes.
//
// Three launches: the best logit (what greedy rows are done with); the shares, added up in buckets by how far below the best a token is, a bucket
// a 64th of the exponent; then the tokens of the buckets down to where the first filter ends are listed by all blocks, and the last of them sorts
// the list, filters and draws. What does not fit into the list is found by that block alone, bucket by bucket. If nothing is to be ranked, shares
// are added up block by block in the order of ids.

enum { SAMPLE_BLOCKS = 128, SAMPLE_THREADS = 512, BUCKETS = 2048, LISTED = 2048 };
// What is added up: tokens, shares before min-p, shares after it.
enum { COUNT = 0, SHARES = 1, DRAWN = 2 };

// How a row's token is chosen.
struct How {
    // 0 takes the best.
    float temperature, min_p;
    // 0 for all; whether there are counts of tokens to go by.
    u32 top_k, penalised;
    // In parts of 2^64, 0 for all; where the random numbers are.
    u64 top_p, counter;
    float repetition, presence, frequency;
    u32 unused;
};

// Of each row: 0 before and after, but for the list.
struct Room {
    u64 shares[BUCKETS], drawn[BUCKETS], list[LISTED], of_blocks[SAMPLE_BLOCKS];
    u32 counts[BUCKETS];
    float best;
    // The best token; buckets whose tokens are listed; tokens listed; blocks that are done.
    u32 id, buckets, listed, weighed, picked;
};

struct Sample {
    Choose choose;
    // `How` and `Room` of each row; of each token how often it was chosen, the highest bit set if it was seen at all.
    u64 how, room, seen;
};

// A row of logits as the sampler sees them.
struct Sampled {
    const float *logits;
    const u32 *seen;
    How how;
    float best;
    u32 known;

    __device__ __forceinline__ float logit(u32 i) const {
        float x = logits[i];
        if (!how.penalised) return x;
        u32 s = seen[i];
        if (!s) return x;
        x = x > 0.0f ? x / how.repetition : x * how.repetition;
        s &= 0x7fffffffu;
        return s ? x - (how.presence + how.frequency * (float)s) : x;
    }

    // Below minus 27, or no number at all: nothing is drawn.
    __device__ __forceinline__ float exponent(float x) const { return (x - best) / how.temperature; }

    // A token that can be drawn: its logit and exponent.
    __device__ __forceinline__ bool candidate(u32 i, float &x, float &e) const {
        x = logit(i);
        if (!(x > __int_as_float(0xff800000))) return false;
        x = fminf(x, 3.402823466e38f);
        e = exponent(x);
        return e >= -27.0f;
    }

    __device__ __forceinline__ u64 worth(u32 kind, float e) const {
        if (kind == COUNT) return 1;
        float w = exp_(e);
        return kind == DRAWN && !(w >= how.min_p) ? 0 : (u64)(w * 549755813888.0f);
    }
};

DEVICE u32 bucket_of(float exponent) { return (u32)(exponent * -64.0f); }

// A number that is the smaller the better a token is.
DEVICE u64 rank_of(float x, u32 id) {
    u32 bits = __float_as_uint(x);
    return (u64)(bits & 0x80000000u ? bits : ~(bits | 0x80000000u)) << 32 | id;
}

DEVICE float logit_of_rank(u64 rank) {
    u32 bits = (u32)(rank >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits : ~bits & 0x7fffffffu);
}

// Such a part of a sum, rounded up, and at least 1.
DEVICE u64 part_of(u64 sum, u64 part) {
    u64 whole = __umul64hi(sum, part) + (sum * part ? 1 : 0);
    return whole ? whole : 1;
}

// The sum of what the threads before have, and of all.
DEVICE u64 sum_before(u64 own, u64 &all) {
    __shared__ u64 of_warps[SAMPLE_THREADS / 32];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 sum = own;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u64 other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    u64 before = sum - own;
    all = 0;
#pragma unroll
    for (u32 w = 0; w < SAMPLE_THREADS / 32; w++) {
        if (w < warp) before += of_warps[w];
        all += of_warps[w];
    }
    return before;
}

template <class Value> DEVICE u64 sum_of(u32 n, Value value) {
    u64 own = 0, all;
    for (u32 i = threadIdx.x; i < n; i += SAMPLE_THREADS) own += value(i);
    sum_before(own, all);
    return all;
}

struct Found {
    u32 at;
    // What comes before it.
    u64 before;
};

// The first place up to which values add up to `wanted`, which is at least 1; false if there is none.
template <class Value> DEVICE bool find(u32 n, u64 wanted, Value value, Found &found) {
    __shared__ Found it;
    u32 each = (n + SAMPLE_THREADS - 1) / SAMPLE_THREADS, first = threadIdx.x * each, end = first + each < n ? first + each : n;
    u64 own = 0, all;
    for (u32 i = first; i < end; i++) own += value(i);
    u64 before = sum_before(own, all);
    if (before < wanted && wanted - before <= own) {
        u32 i = first;
        for (u64 v; v = value(i), before + v < wanted; i++) before += v;
        it.at = i;
        it.before = before;
    }
    __syncthreads();
    found = it;
    return wanted <= all;
}

// Sorts the first `n` of the list in shared memory.
DEVICE void sort_list(u64 *list, u32 n) {
    u32 size = 2;
    while (size < n) size <<= 1;
    for (u32 i = n + threadIdx.x; i < size; i += SAMPLE_THREADS) list[i] = ~0ull;
    for (u32 k = 2; k <= size; k <<= 1)
        for (u32 j = k >> 1; j; j >>= 1) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < size / 2; i += SAMPLE_THREADS) {
                u32 a = 2 * i - (i & (j - 1)), b = a + j;
                u64 x = list[a], y = list[b];
                if ((x > y) == ((a & k) == 0)) {
                    list[a] = y;
                    list[b] = x;
                }
            }
        }
    __syncthreads();
}

// What is added up in a bucket.
DEVICE u64 of_bucket(const Sampled &s, const Room *room, u32 kind, u32 b) {
    if (kind == COUNT) return ((const volatile u32 *)room->counts)[b];
    return ((const volatile u64 *)(kind == DRAWN && s.how.min_p > 0.0f ? room->drawn : room->shares))[b];
}

// Finds tokens by rank: in the list, which has the best ones, or else in their bucket.
struct Ranks {
    const Sampled &s;
    const Room *room;
    u64 *list;
    u32 n;
    // Whether the list begins with the best token.
    bool is_whole;

    __device__ __forceinline__ u64 in_list(u32 kind, u32 i) const { return kind == COUNT ? 1 : s.worth(kind, s.exponent(logit_of_rank(list[i]))); }

    // Calls with the rank and exponent of each token whose rank lies between two, in steps of threads.
    template <class Each> __device__ __forceinline__ void tokens(u64 lo, u64 hi, Each each) const {
        for (u32 i = threadIdx.x; i < s.known; i += SAMPLE_THREADS) {
            float x, e;
            if (!s.candidate(i, x, e)) continue;
            u64 rank = rank_of(x, i);
            if (rank >= lo && rank <= hi) each(rank, e);
        }
    }

    // The list becomes the tokens around the place in bucket `b` up to which `wanted` is reached; gives what comes before them.
    __device__ __forceinline__ u64 load(u32 b, u32 kind, u64 wanted, u64 before) {
        __shared__ u32 listed;
        // A bucket is tokens between two ranks; a bucket on both sides is more than rounding moves them.
        float step = s.how.temperature * 0.015625f;
        u64 lo = rank_of(s.best - step * ((float)b - 1.0f), 0), hi = rank_of(s.best - step * ((float)b + 2.0f), 0xffffffffu);
        u64 in_bucket = of_bucket(s, room, COUNT, b);
        while (in_bucket > LISTED) {
            if (lo >> 32 == hi >> 32 && (u32)hi >= s.known) hi = hi >> 32 << 32 | (s.known - 1);
            u64 mid = lo + (hi - lo) / 2, own = 0, own_count = 0, sum, count;
            tokens(lo, mid, [&](u64, float e) {
                if (bucket_of(e) != b) return;
                own += s.worth(kind, e);
                own_count++;
            });
            sum_before(own, sum);
            sum_before(own_count, count);
            if (before + sum >= wanted) {
                hi = mid;
                in_bucket = count;
            } else {
                before += sum;
                lo = mid + 1;
                in_bucket -= count;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        tokens(lo, hi, [&](u64 rank, float e) {
            if (bucket_of(e) == b) list[atomicAdd(&listed, 1u)] = rank;
        });
        __syncthreads();
        n = listed;
        is_whole = false;
        sort_list(list, n);
        return before;
    }

    // The rank up to which `wanted` is reached.
    __device__ __forceinline__ u64 reaching(u32 kind, u64 wanted) {
        Found found;
        if (is_whole && find(n, wanted, [&](u32 i) { return in_list(kind, i); }, found)) return list[found.at];
        find(BUCKETS, wanted, [&](u32 b) { return of_bucket(s, room, kind, b); }, found);
        u64 before = load(found.at, kind, wanted, found.before);
        find(n, wanted - before, [&](u32 i) { return in_list(kind, i); }, found);
        return list[found.at];
    }

    // What tokens up to a rank add up to.
    __device__ __forceinline__ u64 up_to(u32 kind, u64 rank) const {
        if (is_whole) return sum_of(n, [&](u32 i) { return list[i] <= rank ? in_list(kind, i) : 0; });
        u64 own = 0, all;
        tokens(0, rank, [&](u64, float e) { own += s.worth(kind, e); });
        sum_before(own, all);
        return all;
    }
};

// The row that a block works on; false if there is nothing left to do for it.
DEVICE bool sampled_row(const Sample &p, Sampled &s, Room *&room) {
    s.how = ((const How *)p.how)[blockIdx.y];
    s.logits = (const float *)p.choose.logits + (u64)blockIdx.y * p.choose.vocab;
    s.seen = (const u32 *)p.seen;
    s.known = ((const u32 *)p.choose.head)[1];
    room = (Room *)p.room + blockIdx.y;
    s.best = room->best;
    return s.how.temperature > 0.0f && room->id != NO_TOKEN;
}

// Tells the token, and counts it where counts are gone by.
DEVICE void go_on_counting(const Sample &p, const How &how, u32 token) {
    if (how.penalised && token != NO_TOKEN) {
        u32 *seen = (u32 *)p.seen + token;
        *seen = (*seen | 0x80000000u) + 1;
    }
    go_on_with(p.choose, blockIdx.y, token);
}

extern "C" __global__ void __launch_bounds__(512, 1) sample_best(const Sample p) {
    wait_for_earlier();
    Sampled s;
    Room *room;
    sampled_row(p, s, room);
    Best best;
    if (!best_of_blocks(p.choose, s.known, [&](u32 i) { return s.logit(i); }, best)) return;
    room->best = fminf(best.logit, 3.402823466e38f);
    room->id = best.id;
    if (s.how.temperature == 0.0f || best.id == NO_TOKEN) go_on_counting(p, s.how, best.id);
}

// Whether this block of `of` is the last to come here; the counter is 0 before and after.
DEVICE bool is_last(u32 *counter, u32 of) {
    __shared__ u32 last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, of - 1) == of - 1;
    __syncthreads();
    __threadfence();
    return last;
}

extern "C" __global__ void __launch_bounds__(512, 1) sample_weigh(const Sample p) {
    wait_for_earlier();
    Sampled s;
    Room *room;
    if (!sampled_row(p, s, room)) return;
    bool ranked = s.how.top_k || s.how.top_p;
    u32 span = (s.known + SAMPLE_BLOCKS - 1) / SAMPLE_BLOCKS, first = blockIdx.x * span, end = first + span < s.known ? first + span : s.known;
    u64 own = 0, all;
    for (u32 i = first + threadIdx.x; i < end; i += SAMPLE_THREADS) {
        float x, e;
        if (!s.candidate(i, x, e)) continue;
        if (!ranked) {
            own += s.worth(DRAWN, e);
            continue;
        }
        u32 b = bucket_of(e);
        atomicAdd(&room->counts[b], 1u);
        atomicAdd(&room->shares[b], s.worth(SHARES, e));
        if (s.how.min_p > 0.0f) {
            u64 drawn = s.worth(DRAWN, e);
            if (drawn) atomicAdd(&room->drawn[b], drawn);
        }
    }
    if (!ranked) {
        sum_before(own, all);
        if (threadIdx.x == 0) room->of_blocks[blockIdx.x] = all;
        return;
    }
    if (!is_last(&room->weighed, SAMPLE_BLOCKS)) return;
    // The buckets down to where the first filter ends are listed, if they fit.
    u64 n = sum_of(BUCKETS, [&](u32 b) { return of_bucket(s, room, COUNT, b); });
    u32 buckets = BUCKETS;
    if (n > LISTED) {
        u64 wanted = s.how.top_k;
        u32 kind = COUNT;
        if (!wanted || wanted >= n) {
            kind = SHARES;
            wanted = sum_of(BUCKETS, [&](u32 b) { return of_bucket(s, room, SHARES, b); });
            if (s.how.top_p) wanted = part_of(wanted, s.how.top_p);
        }
        Found found;
        find(BUCKETS, wanted, [&](u32 b) { return of_bucket(s, room, kind, b); }, found);
        buckets = found.at + 1;
        n = sum_of(buckets, [&](u32 b) { return of_bucket(s, room, COUNT, b); });
        if (n > LISTED) buckets = 0;
    }
    if (threadIdx.x == 0) room->buckets = buckets;
}

extern "C" __global__ void __launch_bounds__(512, 1) sample_pick(const Sample p) {
    __shared__ u64 list[LISTED];
    wait_for_earlier();
    Sampled s;
    Room *room;
    if (!sampled_row(p, s, room)) return;
    bool ranked = s.how.top_k || s.how.top_p;
    if (!ranked && blockIdx.x > 0) return;
    u32 span = (s.known + SAMPLE_BLOCKS - 1) / SAMPLE_BLOCKS, first = blockIdx.x * span, end = first + span < s.known ? first + span : s.known;
    u64 state = s.how.counter + 0x9e3779b97f4a7c15ull, random = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
    random = (random ^ random >> 27) * 0x94d049bb133111ebull;
    random ^= random >> 31;
    u32 token;
    Found found;
    if (ranked) {
        u32 buckets = room->buckets;
        for (u32 i = first + threadIdx.x; buckets && i < end; i += SAMPLE_THREADS) {
            float x, e;
            if (s.candidate(i, x, e) && bucket_of(e) < buckets) room->list[atomicAdd(&room->listed, 1u)] = rank_of(x, i);
        }
        if (!is_last(&room->picked, SAMPLE_BLOCKS)) return;
        u32 n = *(volatile u32 *)&room->listed;
        for (u32 i = threadIdx.x; i < n; i += SAMPLE_THREADS) list[i] = ((volatile u64 *)room->list)[i];
        if (n) sort_list(list, n);
        Ranks ranks = {s, room, list, n, n > 0};
        u64 count = sum_of(BUCKETS, [&](u32 b) { return of_bucket(s, room, COUNT, b); }), sum;
        u32 kind = s.how.top_p ? SHARES : DRAWN;
        if (s.how.top_k && s.how.top_k < count) sum = ranks.up_to(kind, ranks.reaching(COUNT, s.how.top_k));
        else sum = sum_of(BUCKETS, [&](u32 b) { return of_bucket(s, room, kind, b); });
        if (s.how.top_p) sum = ranks.up_to(DRAWN, ranks.reaching(SHARES, part_of(sum, s.how.top_p)));
        token = (u32)ranks.reaching(DRAWN, __umul64hi(random, sum) + 1);
        __syncthreads();
        for (u32 b = threadIdx.x; b < BUCKETS; b += SAMPLE_THREADS) {
            room->counts[b] = 0;
            room->shares[b] = 0;
            room->drawn[b] = 0;
        }
        if (threadIdx.x == 0) room->listed = 0;
    } else {
        u64 draw = __umul64hi(random, sum_of(SAMPLE_BLOCKS, [&](u32 i) { return room->of_blocks[i]; })) + 1;
        find(SAMPLE_BLOCKS, draw, [&](u32 i) { return room->of_blocks[i]; }, found);
        first = found.at * span;
        end = first + span < s.known ? first + span : s.known;
        auto share = [&](u32 i) {
            float x, e;
            return s.candidate(first + i, x, e) ? s.worth(DRAWN, e) : 0;
        };
        find(end - first, draw - found.before, share, found);
        token = first + found.at;
    }
    if (threadIdx.x > 0) return;
    ((How *)p.how)[blockIdx.y].counter = state;
    go_on_counting(p, s.how, token);
}
