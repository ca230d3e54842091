// A pass of a Llama-like model over a few tokens, for CPUs with bf16 matrix units (AVX-512 BF16 and AMX).
//
// Such a pass takes as long as reading the weights once. So all of it is one parallel region, whose threads meet at
// barriers instead of being started for each operation, and the weights lie in the order in which they are read.
// Rounding to bf16 is where transformers has it; sums are in fp32.
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;
constexpr int64_t WIDTH = 16;  // outputs in a block of weights: the fp32 lanes of a register
constexpr int64_t TILE = 16;   // tokens in a tile

extern "C" {
struct Matrix {
    const bf16* packed;  // weights [outputs, inputs] as [outputs / 16, inputs / 2, 16, 2]
    const float* bias;   // [outputs], or null
    int64_t num_outputs, num_inputs;
};
struct Layer {
    const bf16 *input_norm, *post_norm, *query_norm, *key_norm;  // the last two may be null
    Matrix qkv, output, gate_up, down;                           // gate_up: a block of gates, a block of ups, in turn
};
struct Model {
    const Layer* layers;
    const bf16 *embedding, *norm;
    Matrix head;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    float norm_eps, query_key_norm_eps;
};
}

namespace {

inline __m512 load(const bf16* x) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store(bf16* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

inline __m512 rounded(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// e^x as 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error below 1e-6
inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.f)), _mm512_set1_ps(88.f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.f / 720);
    for (const float coefficient : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
    return _mm512_scalef_ps(sum, n);
}

// Threads wait for each other without being put to sleep, but give way once somebody else may want the core.
class Barrier {
   public:
    explicit Barrier(int64_t num_threads) : num_threads_(num_threads) {}

    void wait() {
        const int64_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
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
    const int64_t num_threads_;
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

// The tiles of a thread belong to whoever set them up last, such as oneDNN: they are given back as they were.
class Tiles {
   public:
    Tiles() {
        _tile_storeconfig(&before_);
        Config ours{1, 0, {}, {}, {}, {}, {}};
        for (int tile = 0; tile < 5; ++tile) ours.bytes[tile] = 64, ours.rows[tile] = TILE;
        _tile_loadconfig(&ours);
    }
    ~Tiles() {
        if (before_.palette)
            _tile_loadconfig(&before_);
        else
            _tile_release();
    }

   private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[8], reserved_bytes[8];
        uint8_t rows[8], reserved_rows[8];
    };
    Config before_;
};

// Products of blocks [begin, end), an even number, with M tokens. Takes (block, token, sums, sums of the next block).
template <int M, class Take>
void multiply(const Matrix& matrix, int64_t begin, int64_t end, const bf16* x, int64_t stride, Take take) {
    constexpr int BLOCKS = 4;  // as many as there are registers for, so that no sum waits for itself
    const int64_t pairs = matrix.num_inputs / 2, size = matrix.num_inputs * WIDTH;
    for (; begin < end; begin += BLOCKS) {
        const bf16* weights[BLOCKS];
        __m512 sums[BLOCKS][M];
        const int blocks = int(std::min<int64_t>(BLOCKS, end - begin));
        for (int b = 0; b < BLOCKS; ++b) {
            const int64_t block = begin + std::min(b, blocks - 1);  // the last one again where there are fewer
            weights[b] = matrix.packed + block * size;
            for (int m = 0; m < M; ++m)
                sums[b][m] = matrix.bias ? _mm512_loadu_ps(matrix.bias + block * WIDTH) : _mm512_setzero_ps();
        }
        for (int64_t pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                int32_t two;
                std::memcpy(&two, x + m * stride + pair * 2, sizeof(two));
                const __m512bh token = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; ++b)
                    sums[b][m] = _mm512_dpbf16_ps(
                        sums[b][m], (__m512bh)_mm512_loadu_si512(weights[b] + pair * 2 * WIDTH), token);
            }
        for (int m = 0; m < M; ++m)
            for (int b = 0; b < blocks; b += 2) take(begin + b, m, sums[b][m], sums[b + 1][m]);
    }
}

// The same for up to 16 tokens: 16 pairs of inputs of a block are a tile as they lie in memory.
template <class Take>
void multiply_tiles(const Matrix& matrix, int64_t begin, int64_t end, const bf16* x, int64_t stride, int64_t num_tokens,
                    Take take) {
    alignas(64) float sums[2][TILE][WIDTH];
    const int64_t size = matrix.num_inputs * WIDTH;
    for (; begin < end; begin += 2) {
        const bf16* weights = matrix.packed + begin * size;
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < matrix.num_inputs; k += 32) {
            _tile_loadd(2, x + k, stride * sizeof(bf16));
            _tile_loadd(3, weights + k * WIDTH, 64);
            _tile_loadd(4, weights + size + k * WIDTH, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (matrix.bias)
            for (int b = 0; b < 2; ++b) bias[b] = _mm512_loadu_ps(matrix.bias + (begin + b) * WIDTH);
        for (int64_t m = 0; m < num_tokens; ++m)
            take(begin, m, _mm512_add_ps(bias[0], _mm512_load_ps(sums[0][m])),
                 _mm512_add_ps(bias[1], _mm512_load_ps(sums[1][m])));
    }
}

// x [num_tokens, stride], readable up to a multiple of 16 tokens.
template <class Take>
void multiply(const Matrix& matrix, int64_t begin, int64_t end, const bf16* x, int64_t stride, int64_t num_tokens,
              Take take) {
    switch (num_tokens) {
        case 1: return multiply<1>(matrix, begin, end, x, stride, take);
        case 2: return multiply<2>(matrix, begin, end, x, stride, take);
        case 3: return multiply<3>(matrix, begin, end, x, stride, take);
        case 4: return multiply<4>(matrix, begin, end, x, stride, take);
    }
    for (int64_t first = 0; first < num_tokens; first += TILE)
        multiply_tiles(
            matrix, begin, end, x + first * stride, stride, std::min(TILE, num_tokens - first),
            [&](int64_t block, int64_t m, __m512 low, __m512 high) { take(block, first + m, low, high); });
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

// One query over the first `length` places of keys and values [places, size]; scores has room for 16 more.
void attend(const bf16* query, const bf16* keys, const bf16* values, int64_t length, int64_t size, float* scores,
            bf16* to) {
    const float scale = 1.f / std::sqrt(float(size));
    float largest = -INFINITY;
    for (int64_t place = 0; place < length; ++place) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 2 * WIDTH)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query + i),
                                   (__m512bh)_mm512_loadu_si512(keys + place * size + i));
        scores[place] = _mm512_reduce_add_ps(sum) * scale;
        largest = std::max(largest, scores[place]);
    }
    __m512 total = _mm512_setzero_ps();
    for (int64_t place = 0; place < length; place += WIDTH) {
        const __mmask16 inside = __mmask16(length - place >= WIDTH ? 0xffff : (1 << (length - place)) - 1);
        const __m512 score = _mm512_sub_ps(_mm512_maskz_loadu_ps(inside, scores + place), _mm512_set1_ps(largest));
        const __m512 weight = _mm512_maskz_mov_ps(inside, exponential(score));
        _mm512_storeu_ps(scores + place, weight);
        total = _mm512_add_ps(total, weight);
    }
    const __m512 inverse = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(total));
    for (int64_t i = 0; i < size; i += 2 * WIDTH) {
        __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
        for (int64_t place = 0; place < length; ++place) {
            const __m512 weight = _mm512_set1_ps(scores[place]);
            low = _mm512_fmadd_ps(weight, load(values + place * size + i), low);
            high = _mm512_fmadd_ps(weight, load(values + place * size + i + WIDTH), high);
        }
        store(to + i, _mm512_mul_ps(low, inverse));
        store(to + i + WIDTH, _mm512_mul_ps(high, inverse));
    }
}

}  // namespace

extern "C" {

// Asks Linux for the tiles; 0 if they are granted.
int64_t request_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

// Reads num_tokens tokens at these places of these rows, and adds them to the caches.
//
// keys, values: of each layer, [rows, kv_heads, capacity, head_dim]. cos, sin: [capacity, head_dim].
// last: [num_tokens, hidden_size], what enters the head. logits: [num_tokens, outputs of the head], or null.
void forward(const Model* model, bf16* const* keys, bf16* const* values, int64_t capacity, int64_t num_tokens,
             const int64_t* tokens, const int64_t* rows, const int64_t* places, const bf16* cos, const bf16* sin,
             bf16* last, bf16* logits, int64_t num_threads) {
    const int64_t n = num_tokens, padded = n <= 4 ? n : (n + TILE - 1) / TILE * TILE;  // tiles are read whole
    const int64_t hidden_size = model->hidden_size, middle_size = model->intermediate_size;
    const int64_t num_heads = model->num_heads, num_kv_heads = model->num_kv_heads, head_dim = model->head_dim;
    const int64_t group = num_heads / num_kv_heads, attended_size = num_heads * head_dim;
    const int64_t qkv_size = attended_size + 2 * num_kv_heads * head_dim;
    constexpr int64_t NUM_OPERATIONS = 6;
    static thread_local std::vector<bf16> scratch;  // kept: new memory would cost a page fault for each of its pages
    scratch.resize(padded * (2 * hidden_size + qkv_size + attended_size + middle_size));
    bf16* const hidden = scratch.data();
    bf16* const normed = hidden + padded * hidden_size;
    bf16* const qkv = normed + padded * hidden_size;
    bf16* const attended = qkv + padded * qkv_size;
    bf16* const activated = attended + padded * attended_size;
    for (int64_t m = 0; m < n; ++m)
        std::memcpy(hidden + m * hidden_size, model->embedding + tokens[m] * hidden_size, hidden_size * sizeof(bf16));
    std::vector<Parts> parts(model->num_layers * NUM_OPERATIONS + 1);
    Barrier barrier(num_threads);

#pragma omp parallel num_threads(int(num_threads))
    {
        const Tiles tiles;
        std::vector<float> scores(capacity + WIDTH);
        const auto normalise = [&](const bf16* weight, float eps, bf16* to) {
            for (int64_t m = omp_get_thread_num(); m < n; m += num_threads)
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
            normalise(layer.input_norm, model->norm_eps, normed);
            part[0].take(qkv_size / WIDTH, 4, [&](int64_t begin, int64_t end) {
                multiply(layer.qkv, begin, end, normed, hidden_size, n,
                         [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                             store(qkv + m * qkv_size + block * WIDTH, low);
                             store(qkv + m * qkv_size + (block + 1) * WIDTH, high);
                         });
            });
            barrier.wait();
            // a key head, its value, and the queries that look at it
            part[1].take(n * num_kv_heads, 1, [&](int64_t unit, int64_t) {
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
                const int64_t place = ((rows[m] * num_kv_heads + head) * capacity + places[m]) * head_dim;
                std::memcpy(keys[index] + place, key, head_dim * sizeof(bf16));
                std::memcpy(values[index] + place, key + num_kv_heads * head_dim, head_dim * sizeof(bf16));
            });
            barrier.wait();
            part[2].take(n * num_heads, 1, [&](int64_t unit, int64_t) {
                const int64_t m = unit / num_heads, head = unit % num_heads;
                const int64_t start = (rows[m] * num_kv_heads + head / group) * capacity * head_dim;
                attend(qkv + m * qkv_size + head * head_dim, keys[index] + start, values[index] + start, places[m] + 1,
                       head_dim, scores.data(), attended + m * attended_size + head * head_dim);
            });
            barrier.wait();
            part[3].take(hidden_size / WIDTH, 2, [&](int64_t begin, int64_t end) {
                multiply(layer.output, begin, end, attended, attended_size, n, add);
            });
            barrier.wait();
            normalise(layer.post_norm, model->norm_eps, normed);
            part[4].take(2 * middle_size / WIDTH, 4, [&](int64_t begin, int64_t end) {
                multiply(layer.gate_up, begin, end, normed, hidden_size, n,
                         [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                             const __m512 gate = rounded(low), one = _mm512_set1_ps(1.f);
                             const __m512 inverse = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
                             const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, inverse));
                             store(activated + m * middle_size + block / 2 * WIDTH,
                                   _mm512_mul_ps(rounded(silu), rounded(high)));
                         });
            });
            barrier.wait();
            part[5].take(hidden_size / WIDTH, 2, [&](int64_t begin, int64_t end) {
                multiply(layer.down, begin, end, activated, middle_size, n, add);
            });
            barrier.wait();
        }
        normalise(model->norm, model->norm_eps, normed);
        if (omp_get_thread_num() == 0) std::memcpy(last, normed, n * hidden_size * sizeof(bf16));
        if (logits) {
            const int64_t size = model->head.num_outputs;
            parts.back().take(size / WIDTH, 32, [&](int64_t begin, int64_t end) {
                multiply(model->head, begin, end, normed, hidden_size, n,
                         [&](int64_t block, int64_t m, __m512 low, __m512 high) {
                             store(logits + m * size + block * WIDTH, low);
                             store(logits + m * size + (block + 1) * WIDTH, high);
                         });
            });
        }
    }
}
}
