// A pass of a Llama-like model, for CPUs with AVX-512; their bf16 matrix units (AMX) are made use of where there are some.
//
// A pass over a few tokens takes as long as reading the weights once. So all of it is one parallel region, whose threads meet at
// barriers instead of being started for each operation, and the weights lie in the order in which they are read.
// Rounding to bf16 is where transformers has it, but for rotations; sums are in fp32.
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AMX_TILE__
#include "native_amx.h"
#else
#include "native_avx512.h"
#endif

extern "C" {
struct Layer {
    const bf16 *input_norm, *post_norm, *query_norm, *key_norm;  // the last two may be null
    Matrix qkv, output, gate_up, down;                           // gate_up: a block of gates, a block of ups, in turn
    // without the weights of qkv there is no attention, without those of gate_up no MLP
};
struct Model {
    const Layer* layers;
    const bf16 *embedding, *norm;  // without a norm, `last` is what leaves the last layer
    Matrix head;
    int64_t vocab_size, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    float norm_eps, query_key_norm_eps;
};
}

namespace {

// Threads wait for each other without being put to sleep, but give way once somebody else may want the core.
class Barrier {
   public:
    void wait() {
        const int64_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == omp_get_num_threads() - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins)
            if (spins < 4000)
                _mm_pause();
            else
                sched_yield();
    }

   private:
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<int64_t> turn_{0};
};

// The parts of one operation, taken by whichever thread is free.
class Parts {
   public:
    template <class Work>
    void take(int64_t count, int64_t size, Work work) {
        for (int64_t begin; (begin = next_.fetch_add(size, std::memory_order_relaxed)) < count;)
            work(begin, std::min(begin + size, count));
    }

   private:
    alignas(64) std::atomic<int64_t> next_{0};
};

// Products of all of a matrix with x [num_tokens, stride], whose blocks are taken `size` at a time.
template <class Take>
void product_of_one(const Matrix& matrix, Parts& part, int64_t size, const bf16* x, int64_t stride,
                    int64_t num_tokens, Take take) {
    static thread_local Inputs inputs;
    inputs.take(matrix, x, stride, num_tokens);
    part.take(matrix.num_outputs / WIDTH, size,
              [&](int64_t begin, int64_t end) { inputs.multiply(matrix, begin, end, take); });
}

// The same, after its inner matrix if it has one, whose outputs go into `between`. parts: for the inner one, for this.
template <class Take>
void product(const Matrix& matrix, Parts* parts, int64_t size, const bf16* x, int64_t stride, int64_t num_tokens,
             bf16* between, Barrier& barrier, Take take) {
    if (const Matrix* inner = matrix.inner) {
        const int64_t rank = inner->num_outputs;
        product_of_one(*inner, parts[0], 2, x, stride, num_tokens,
                       [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                           store(between + m * rank + block * WIDTH, low);
                           store(between + m * rank + (block + 1) * WIDTH, high);
                       });
        barrier.wait();
        x = between, stride = rank;
    }
    product_of_one(matrix, parts[1], size, x, stride, num_tokens, take);
}

void rms_norm(const bf16* x, const bf16* weight, float eps, int64_t size, bf16* to) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += WIDTH) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / float(size) + eps));
    for (int64_t i = 0; i < size; i += WIDTH)
        store(to + i, _mm512_mul_ps(load(weight + i), rounded(_mm512_mul_ps(load(x + i), scale))));
}

// cos, sin [size]; sin carries the sign of the half that it multiplies
void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += WIDTH) {
        const __m512 low = load(x + i), high = load(x + half + i);
        store(x + i, _mm512_fmadd_ps(high, load(sin + i), rounded(_mm512_mul_ps(low, load(cos + i)))));
        store(x + half + i,
              _mm512_fmadd_ps(low, load(sin + half + i), rounded(_mm512_mul_ps(high, load(cos + half + i)))));
    }
}

}  // namespace

extern "C" {

// Asks the system for matrix units; 0 if they are granted, or not asked for.
int64_t request_units() { return grant_units(); }

// Reads `width` tokens of each row at these places, and adds them to the caches. 0, or 1 with nothing done where a token
// or a place is none of the model or the caches.
//
// tokens, places: [num_rows, width]. entering: [tokens, hidden_size], instead of their embeddings, or null.
// keys, values: of each layer, [rows, kv_heads, capacity, head_dim]. cos, sin: [capacity, head_dim].
// last: [tokens, hidden_size], what enters the head. logits: [tokens, outputs of the head], or null.
int64_t forward(const Model* model, bf16* const* keys, bf16* const* values, int64_t capacity, int64_t num_rows,
                int64_t width, const int64_t* tokens, const bf16* entering, const int64_t* places, const bf16* cos, const bf16* sin,
                bf16* last, bf16* logits, int64_t num_threads) {
    const int64_t n = num_rows * width, padded = (n + TILE - 1) / TILE * TILE;  // tiles are read whole
    if (n == 0) return 0;
    const int64_t length = *std::max_element(places, places + n) + 1;
    const int64_t hidden_size = model->hidden_size, middle_size = model->intermediate_size;
    const int64_t num_heads = model->num_heads, num_kv_heads = model->num_kv_heads, head_dim = model->head_dim;
    const int64_t group = num_heads / num_kv_heads, attended_size = num_heads * head_dim;
    const int64_t qkv_size = attended_size + 2 * num_kv_heads * head_dim;
    if (length > capacity || *std::min_element(places, places + n) < 0) return 1;
    for (int64_t m = 0; m < n; ++m)
        if (tokens[m] < 0 || tokens[m] >= model->vocab_size) return 1;
    constexpr int64_t NUM_OPERATIONS = 10;  // each product has two, one for an inner matrix
    int64_t rank = 0;
    for (int64_t index = 0; index < model->num_layers; ++index)
        for (const Matrix Layer::*each : {&Layer::qkv, &Layer::output, &Layer::gate_up, &Layer::down})
            if (const Matrix* inner = (model->layers[index].*each).inner) rank = std::max(rank, inner->num_outputs);
    static thread_local std::vector<bf16> scratch;  // kept: new memory would cost a page fault for each of its pages
    scratch.resize(padded * (2 * hidden_size + qkv_size + attended_size + middle_size + rank));
    bf16* const hidden = scratch.data();
    bf16* const normed = hidden + padded * hidden_size;
    bf16* const qkv = normed + padded * hidden_size;
    bf16* const attended = qkv + padded * qkv_size;
    bf16* const activated = attended + padded * attended_size;
    bf16* const between = activated + padded * middle_size;
    for (int64_t m = 0; m < n; ++m)
        std::memcpy(hidden + m * hidden_size,
                    entering ? entering + m * hidden_size : model->embedding + tokens[m] * hidden_size,
                    hidden_size * sizeof(bf16));
    std::vector<Parts> parts(model->num_layers * NUM_OPERATIONS + 1);
    Barrier barrier;

#pragma omp parallel num_threads(int(num_threads))
    {
        const Units units;
        Attention attention(length, head_dim);
        const auto normalise = [&](const bf16* weight, float eps, bf16* to) {
            for (int64_t m = omp_get_thread_num(); m < n; m += omp_get_num_threads())  // perhaps fewer than asked for
                rms_norm(hidden + m * hidden_size, weight, eps, hidden_size, to + m * hidden_size);
            barrier.wait();
        };
        const auto add = [&](int64_t block, int64_t m, __m512 low, __m512 high) {
            bf16* to = hidden + m * hidden_size + block * WIDTH;
            store(to, _mm512_add_ps(load(to), rounded(low)));
            store(to + WIDTH, _mm512_add_ps(load(to + WIDTH), rounded(high)));
        };
        for (int64_t index = 0; index < model->num_layers; ++index) {
            const Layer& layer = model->layers[index];
            Parts* part = &parts[index * NUM_OPERATIONS];
            if (layer.qkv.packed) {
                normalise(layer.input_norm, model->norm_eps, normed);
                product(layer.qkv, &part[0], 4, normed, hidden_size, n, between, barrier,
                        [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                            store(qkv + m * qkv_size + block * WIDTH, low);
                            store(qkv + m * qkv_size + (block + 1) * WIDTH, high);
                        });
                barrier.wait();
                // a key head, its value, and the queries that look at it
                part[2].take(n * num_kv_heads, 1, [&](int64_t unit, int64_t) {
                    const int64_t m = unit / num_kv_heads, head = unit % num_kv_heads;
                    bf16* const states = qkv + m * qkv_size;
                    bf16* const key = states + attended_size + head * head_dim;
                    const bf16 *c = cos + places[m] * head_dim, *s = sin + places[m] * head_dim;
                    for (int64_t g = 0; g < group; ++g) {
                        bf16* const query = states + (head * group + g) * head_dim;
                        if (layer.query_norm) rms_norm(query, layer.query_norm, model->query_key_norm_eps, head_dim, query);
                        rotate(query, c, s, head_dim);
                    }
                    if (layer.key_norm) rms_norm(key, layer.key_norm, model->query_key_norm_eps, head_dim, key);
                    rotate(key, c, s, head_dim);
                    const int64_t place = ((m / width * num_kv_heads + head) * capacity + places[m]) * head_dim;
                    std::memcpy(keys[index] + place, key, head_dim * sizeof(bf16));
                    std::memcpy(values[index] + place, key + num_kv_heads * head_dim, head_dim * sizeof(bf16));
                });
                barrier.wait();
                // of a row, the queries that look at one head of keys, 16 of them at a time
                const int64_t num_queries = width * group, chunks = (num_queries + TILE - 1) / TILE;
                part[3].take(num_rows * num_kv_heads * chunks, 1, [&](int64_t unit, int64_t) {
                    const int64_t row = unit / chunks / num_kv_heads, head = unit / chunks % num_kv_heads;
                    const int64_t start = (row * num_kv_heads + head) * capacity * head_dim;
                    const int64_t first = unit % chunks * TILE, count = std::min(TILE, num_queries - first);
                    const auto token = [&](int64_t i) { return row * width + (first + i) / group; };
                    const auto place_of = [&](int64_t i) { return (head * group + (first + i) % group) * head_dim; };
                    int64_t lengths[TILE];
                    for (int64_t i = 0; i < count; ++i) {
                        lengths[i] = places[token(i)] + 1;
                        std::memcpy(attention.query(i), qkv + token(i) * qkv_size + place_of(i), head_dim * sizeof(bf16));
                    }
                    attention.attend(keys[index] + start, values[index] + start, lengths, count,
                                     [&](int64_t i, int64_t begin, __m512 low, __m512 high) {
                                         bf16* to = attended + token(i) * attended_size + place_of(i) + begin;
                                         store(to, low);
                                         store(to + WIDTH, high);
                                     });
                });
                barrier.wait();
                product(layer.output, &part[4], 2, attended, attended_size, n, between, barrier, add);
                barrier.wait();
            }
            if (layer.gate_up.packed) {
                normalise(layer.post_norm, model->norm_eps, normed);
                product(layer.gate_up, &part[6], 4, normed, hidden_size, n, between, barrier,
                        [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                            const __m512 gate = rounded(low), one = _mm512_set1_ps(1.f);
                            const __m512 inverse = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
                            const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, inverse));
                            store(activated + m * middle_size + block / 2 * WIDTH,
                                  _mm512_mul_ps(rounded(silu), rounded(high)));
                        });
                barrier.wait();
                product(layer.down, &part[8], 2, activated, middle_size, n, between, barrier, add);
                barrier.wait();
            }
        }
        if (model->norm) normalise(model->norm, model->norm_eps, normed);
        if (omp_get_thread_num() == 0) std::memcpy(last, model->norm ? normed : hidden, n * hidden_size * sizeof(bf16));
        if (logits) {
            const int64_t size = model->head.num_outputs;
            product_of_one(model->head, parts.back(), 32, normed, hidden_size, n,
                    [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                        store(logits + m * size + block * WIDTH, low);
                        store(logits + m * size + (block + 1) * WIDTH, high);
                    });
        }
    }
    return 0;
}
}
