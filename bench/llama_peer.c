/* Measures llama.cpp through its C API, one process per mode; bench/peers.py builds and runs it.
 *
 * What is timed is llama_decode alone, on token ids, as llama.cpp's own bench does it; every figure is one line
 * "NAME SECONDS" on standard output. Text, sampling and logging take no part. With `startup` one token is decoded, the
 * most probable id is found and its text is written, and the caller takes the time from exec to that line.
 *
 *   llama_peer MODEL THREADS REPACK FLASH info
 *   llama_peer MODEL THREADS REPACK FLASH startup
 *   llama_peer MODEL THREADS REPACK FLASH speed  PREFILL,PREFILL,.. DECODE REPEAT
 *   llama_peer MODEL THREADS REPACK FLASH depth  CONTEXT DECODE REPEAT
 *   llama_peer SOURCE THREADS 0     0     quantize FTYPE OUTPUT
 *
 * `depth` evaluates 512 tokens, repeats their cache rows up to CONTEXT through the state functions of the API, and decodes
 * from there: how fast a decode is does not depend on what the cache holds. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "llama_peer: %s\n", what);
    exit(1);
}

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static uint32_t drawn = 1;

static llama_token draw(int32_t vocab) {
    drawn = drawn * 1664525u + 1013904223u;
    return (llama_token)((uint64_t)drawn * (uint32_t)vocab >> 32);
}

/* One call per 512 tokens at most, logits of the last token alone. */
static void feed(struct llama_context *ctx, int32_t vocab, int n) {
    llama_token ids[512];
    for (int done = 0; done < n;) {
        int step = n - done < 512 ? n - done : 512;
        for (int i = 0; i < step; i++) ids[i] = draw(vocab);
        if (llama_decode(ctx, llama_batch_get_one(ids, step)) != 0) die("llama_decode failed");
        done += step;
    }
    llama_synchronize(ctx);
}

static void decode(struct llama_context *ctx, int32_t vocab, int n) {
    for (int i = 0; i < n; i++) feed(ctx, vocab, 1);
}

static uint8_t *from, *to; /* where grow reads and writes */

static void copy(size_t bytes) {
    memcpy(to, from, bytes);
    from += bytes;
    to += bytes;
}

static uint64_t number(size_t bytes) {
    uint64_t n = 0;
    memcpy(&n, from, bytes);
    copy(bytes);
    return n;
}

/* Repeats `rows` rows of `bytes` until there are `want`. */
static void repeat_rows(size_t bytes, uint32_t rows, uint32_t want) {
    for (uint32_t i = 0; i < want; i++) memcpy(to + (size_t)i * bytes, from + (size_t)(i % rows) * bytes, bytes);
    from += (size_t)rows * bytes;
    to += (size_t)want * bytes;
}

/* Makes the context as if `want` tokens had been evaluated: saves the state of the sequence, repeats its rows, loads it.
 * A state is: magic u32, sequence i32, streams u32 (1), cells u32; per cell position i32, 1 u32, maybe more, sequence i32; transposed u32, layers u32;
 * per layer type i32, bytes of a row u64, rows of keys; then the same for values, or, transposed, type i32, bytes of an
 * element u32, elements u32, and cells per element; what recurrent layers keep follows (cells u32, position i32, ..)
 * and stays as it is but for its position. llama.cpp checks all of it as it loads. */
static void grow(struct llama_context *ctx, uint32_t want) {
    size_t size = llama_state_seq_get_size(ctx, 0);
    uint8_t *state = malloc(size), *grown = malloc(size / 512 * want + size);
    if (!state || !grown || llama_state_seq_get_data(ctx, state, size, 0) != size) die("the state cannot be saved");
    from = state, to = grown;
    number(8);
    if (number(4) != 1) die("expected one stream");
    uint32_t cells;
    memcpy(&cells, from, 4);
    memcpy(to, &want, 4);
    from += 4, to += 4;
    size_t cell = 12; /* up to the second cell, which is at position 1 */
    for (uint32_t next[2] = {0, 0};; cell += 4) {
        memcpy(next, from + cell, 8);
        if (next[0] == 1 && next[1] == 1) break;
        if (cell > 64) die("the cells of the state are not understood");
    }
    uint8_t *first = to;
    repeat_rows(cell, cells, want);
    for (uint32_t i = 0; i < want; i++) memcpy(first + i * cell, &i, 4);
    int transposed = (int)number(4);
    uint32_t layers = (uint32_t)number(4);
    for (uint32_t l = 0; l < 2 * layers; l++) {
        number(4);
        if (l < layers || !transposed) {
            repeat_rows((size_t)number(8), cells, want);
            continue;
        }
        size_t element = (size_t)number(4);
        for (uint32_t i = (uint32_t)number(4); i > 0; i--) repeat_rows(element, cells, want);
    }
    if (from < state + size) { /* one cell, at the last position */
        uint32_t cell[2], last[2] = {1, want - 1};
        memcpy(cell, from, 8);
        if (cell[0] != 1 || cell[1] != cells - 1) die("the recurrent part of the state is not understood");
        memcpy(to, last, 8);
        from += 8, to += 8;
    }
    copy((size_t)(state + size - from));
    size_t bytes = (size_t)(to - grown);
    llama_memory_clear(llama_get_memory(ctx), false);
    if (llama_state_seq_set_data(ctx, grown, bytes, 0) != bytes) die("the state cannot be loaded");
    if (llama_memory_seq_pos_max(llama_get_memory(ctx), 0) != (int32_t)want - 1) die("the context did not grow");
    free(state);
    free(grown);
}

int main(int argc, char **argv) {
    if (argc < 6) die("expected MODEL THREADS REPACK FLASH COMMAND");
    const char *path = argv[1], *command = argv[5];
    int threads = atoi(argv[2]), repack = atoi(argv[3]), flash = atoi(argv[4]);
    llama_log_set(silent, NULL);
    llama_backend_init();
    if (!strcmp(command, "info")) {
        printf("%s\n", llama_print_system_info());
        return 0;
    }
    if (!strcmp(command, "quantize")) {
        if (argc != 8) die("quantize: expected FTYPE OUTPUT");
        struct llama_model_quantize_params q = llama_model_quantize_default_params();
        q.nthread = threads;
        q.ftype = (enum llama_ftype)atoi(argv[6]);
        return llama_model_quantize(path, argv[7], &q) != 0;
    }
    int depth = !strcmp(command, "depth") ? atoi(argv[6]) : 0;
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    mp.use_extra_bufts = repack;
    struct llama_model *model = llama_model_load_from_file(path, mp);
    if (!model) die("the model cannot be loaded");
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = depth ? (uint32_t)depth + 1024 : 1024;
    cp.n_batch = 512;
    cp.n_ubatch = 512;
    cp.n_threads = threads;
    cp.n_threads_batch = threads;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *ctx = llama_init_from_model(model, cp);
    if (!ctx) die("no context");
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    int32_t n_vocab = llama_vocab_n_tokens(vocab);

    if (!strcmp(command, "startup")) {
        llama_token id = 1;
        if (llama_decode(ctx, llama_batch_get_one(&id, 1)) != 0) die("llama_decode failed");
        const float *logits = llama_get_logits_ith(ctx, -1);
        int32_t best = 0;
        for (int32_t i = 1; i < n_vocab; i++)
            if (logits[i] > logits[best]) best = i;
        char text[256];
        int n = llama_token_to_piece(vocab, best, text, sizeof text, 0, true);
        printf("%d %.*s\n", best, n > 0 ? n : 0, text);
        fflush(stdout);
        return 0;
    }
    llama_memory_t memory = llama_get_memory(ctx);
    if (!strcmp(command, "speed")) {
        if (argc != 9) die("speed: expected PREFILLS DECODE REPEAT");
        int tokens = atoi(argv[7]), repeat = atoi(argv[8]);
        for (char *p = strtok(argv[6], ","); p; p = strtok(NULL, ",")) {
            int n = atoi(p);
            for (int r = -1; r < repeat; r++) { /* the first round warms up */
                llama_memory_clear(memory, false);
                double t = now();
                feed(ctx, n_vocab, n);
                if (r >= 0) printf("prefill_%d %.6f\n", n, now() - t);
            }
        }
        for (int r = 0; r < repeat; r++) {
            llama_memory_clear(memory, false);
            decode(ctx, n_vocab, 1);
            double t = now();
            decode(ctx, n_vocab, tokens);
            printf("decode_%d %.6f\n", tokens, now() - t);
        }
        return 0;
    }
    if (depth > 0 && argc == 9) {
        int tokens = atoi(argv[7]), repeat = atoi(argv[8]);
        if (tokens * repeat + 1 > 1024) die("depth: DECODE * REPEAT is at most 1023");
        feed(ctx, n_vocab, 512);
        grow(ctx, (uint32_t)depth);
        decode(ctx, n_vocab, 1);
        for (int r = 0; r < repeat; r++) {
            double t = now();
            decode(ctx, n_vocab, tokens);
            printf("decode_%d_at_%d %.6f\n", tokens, depth, now() - t);
        }
        return 0;
    }
    die("unknown command");
}
