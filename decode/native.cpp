// A pass of a Llama-like model, for CPUs with bf16 matrix units (AVX-512 BF16 and AMX).
//
// A pass over a few tokens takes as long as reading the weights once. So all of it is one parallel region, whose threads meet at
// barriers instead of being started for each operation, and the weights lie in the order in which they are read.
// Rounding to bf16 is where transformers has it, but for rotations; sums are in fp32.
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

#include "native.h"

constexpr int64_t TILE = 16;   // rows of a tile
constexpr int64_t GROUP = 64;  // quantised inputs of one scale: a tile's

extern "C" {
struct Matrix {
    // weights [outputs, inputs]. bits 16: bf16 as [outputs / WIDTH, inputs / 2, WIDTH, 2]. bits 8: signed as
    // [outputs / WIDTH, inputs / 4, WIDTH, 4]. bits 4: of two blocks of outputs, the first in the low half of each byte, as
    // bits 8 has one; 8 more than the number
    const void* packed;
    const float* bias;   // [outputs], or null
    const bf16* scales;  // of bits 8 and 4: [outputs / WIDTH, inputs / GROUP, WIDTH]
    const Matrix* inner;  // what its inputs are the outputs of, for two factors instead of one matrix; or null
    int64_t num_outputs, num_inputs, bits;
};
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

// The compiler does not know that tiles, and what they are to be, are read from memory.
inline void written() { asm volatile("" ::: "memory"); }

// The tiles of a thread belong to whoever set them up last, such as oneDNN: they are given back as they were.
class Tiles {
   public:
    Tiles() {
        _tile_storeconfig(&before_);
        Config ours{1, 0, {}, {}, {}, {}, {}};
        for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.rows[tile] = TILE;
        written();
        _tile_loadconfig(&ours);
    }
    ~Tiles() {
        written();
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

// Products of two blocks with one or two tiles of 16 tokens, x [16 or 32, stride]: sums[tile of tokens * 2 + block].
template <int TILES>
inline void multiply_pair(const bf16* weights, int64_t num_inputs, const bf16* x, int64_t stride,
                          float (&sums)[4][TILE][WIDTH]) {
    const bf16* const next = weights + num_inputs * WIDTH;
    written();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < num_inputs; k += 32) {  // 16 pairs of inputs of a block are a tile as they lie in memory
        _tile_loadd(4, x + k, stride * sizeof(bf16));
        _tile_loadd(6, weights + k * WIDTH, 64);
        _tile_loadd(7, next + k * WIDTH, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, x + TILE * stride + k, stride * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
}

// Products of blocks [begin, end), an even number, with x [num_tokens, stride], readable up to a multiple of 16 tokens.
// Calls take(block, token, sums, sums of the next block).
template <class Take>
void multiply(const Matrix& matrix, int64_t begin, int64_t end, const bf16* x, int64_t stride, int64_t num_tokens,
              Take take) {
    alignas(64) float sums[4][TILE][WIDTH];
    for (int64_t first = 0; first < num_tokens; first += 2 * TILE) {
        const bool two = num_tokens - first > TILE;
        for (int64_t block = begin; block < end; block += 2) {
            const auto multiply_here = two ? multiply_pair<2> : multiply_pair<1>;
            multiply_here(static_cast<const bf16*>(matrix.packed) + block * matrix.num_inputs * WIDTH,
                          matrix.num_inputs, x + first * stride, stride, sums);
            __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            if (matrix.bias)
                for (int b = 0; b < 2; ++b) bias[b] = _mm512_loadu_ps(matrix.bias + (block + b) * WIDTH);
            for (int64_t m = 0; m < std::min(2 * TILE, num_tokens - first); ++m) {
                const auto* of_token = &sums[m / TILE * 2][m % TILE];
                take(block, first + m, _mm512_add_ps(bias[0], _mm512_load_ps(of_token[0])),
                     _mm512_add_ps(bias[1], _mm512_load_ps(of_token[TILE])));
            }
        }
    }
}

// Tokens whose inputs are rounded to 8 bits, in groups with a scale each.
class Rounded {
   public:
    void take(const bf16* x, int64_t stride, int64_t num_tokens, int64_t num_inputs) {
        const int64_t padded = (num_tokens + TILE - 1) / TILE * TILE;
        size = num_inputs, num_groups = num_inputs / GROUP;
        values.resize(padded * size);
        scales.resize(padded * num_groups);
        for (int64_t m = 0; m < num_tokens; ++m)
            for (int64_t g = 0; g < num_groups; ++g) {
                const bf16* from = x + m * stride + g * GROUP;
                __m512 largest = _mm512_setzero_ps();
                for (int64_t i = 0; i < GROUP; i += WIDTH) largest = _mm512_max_ps(largest, _mm512_abs_ps(load(from + i)));
                const float scale = _mm512_reduce_max_ps(largest) / 127;
                const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
                scales[m * num_groups + g] = scale;
                for (int64_t i = 0; i < GROUP; i += WIDTH)
                    _mm_storeu_si128(
                        reinterpret_cast<__m128i*>(values.data() + m * size + g * GROUP + i),
                        _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load(from + i), inverse))));
            }
    }
    int64_t size = 0, num_groups = 0;
    std::vector<int8_t> values;  // [tokens up to a multiple of TILE, inputs]
    std::vector<float> scales;   // [tokens, groups]
};

// A group's tile of two blocks of weights, into tiles 6 and 7.
template <int BITS>
inline void load_quantised(const int8_t* packed, int64_t block, int64_t group, int64_t num_groups, int8_t* room) {
    constexpr int64_t SIZE = TILE * GROUP;
    if constexpr (BITS == 8) {
        _tile_loadd(6, packed + (block * num_groups + group) * SIZE, GROUP);
        _tile_loadd(7, packed + ((block + 1) * num_groups + group) * SIZE, GROUP);
    } else {
        const int8_t* from = packed + (block / 2 * num_groups + group) * SIZE;
        const __m512i half = _mm512_set1_epi8(0x0f), eight = _mm512_set1_epi8(8);
        for (int64_t i = 0; i < SIZE; i += GROUP) {
            const __m512i both = _mm512_loadu_si512(from + i);
            const __m512i low = _mm512_and_si512(both, half);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
            _mm512_store_si512(room + i, _mm512_sub_epi8(low, eight));
            _mm512_store_si512(room + SIZE + i, _mm512_sub_epi8(high, eight));
        }
        written();
        _tile_loadd(6, room, GROUP);
        _tile_loadd(7, room + SIZE, GROUP);
    }
}

// As `multiply`, for weights of 8 or 4 bits.
template <int BITS, class Take>
void multiply_quantised(const Matrix& matrix, int64_t begin, int64_t end, const Rounded& x, int64_t num_tokens,
                        Take take) {
    alignas(64) int32_t sums[2][TILE][WIDTH];
    alignas(64) int8_t room[2 * TILE * GROUP];
    const auto* packed = static_cast<const int8_t*>(matrix.packed);
    for (int64_t first = 0; first < num_tokens; first += TILE) {
        const int64_t count = std::min(TILE, num_tokens - first);
        for (int64_t block = begin; block < end; block += 2) {
            __m512 totals[2][TILE];
            for (int b = 0; b < 2; ++b) {
                const __m512 bias =
                    matrix.bias ? _mm512_loadu_ps(matrix.bias + (block + b) * WIDTH) : _mm512_setzero_ps();
                for (int64_t m = 0; m < count; ++m) totals[b][m] = bias;
            }
            for (int64_t g = 0; g < x.num_groups; ++g) {
                load_quantised<BITS>(packed, block, g, x.num_groups, room);
                _tile_zero(0);
                _tile_zero(1);
                _tile_loadd(4, x.values.data() + first * x.size + g * GROUP, x.size);
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                _tile_stored(0, sums[0], 64);
                _tile_stored(1, sums[1], 64);
                written();
                for (int b = 0; b < 2; ++b) {
                    const __m512 scale = load(matrix.scales + ((block + b) * x.num_groups + g) * WIDTH);
                    for (int64_t m = 0; m < count; ++m) {
                        const __m512 factor =
                            _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[(first + m) * x.num_groups + g]));
                        totals[b][m] =
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[b][m])), factor, totals[b][m]);
                    }
                }
            }
            for (int64_t m = 0; m < count; ++m) take(block, first + m, totals[0][m], totals[1][m]);
        }
    }
}

// Products of all of a matrix with x [num_tokens, stride], whose blocks are taken `size` at a time.
template <class Take>
void product_of_one(const Matrix& matrix, Parts& part, int64_t size, const bf16* x, int64_t stride,
                    int64_t num_tokens, Take take) {
    static thread_local Rounded to_bytes;
    if (matrix.bits != 16) to_bytes.take(x, stride, num_tokens, matrix.num_inputs);
    part.take(matrix.num_outputs / WIDTH, size, [&](int64_t begin, int64_t end) {
        if (matrix.bits == 16)
            multiply(matrix, begin, end, x, stride, num_tokens, take);
        else if (matrix.bits == 8)
            multiply_quantised<8>(matrix, begin, end, to_bytes, num_tokens, take);
        else
            multiply_quantised<4>(matrix, begin, end, to_bytes, num_tokens, take);
    });
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

// [16, 16] to its transpose, whose rows are `stride` apart.
void transpose(const float (&from)[TILE][WIDTH], float* to, int64_t stride) {
    __m512 pairs[TILE], fours[TILE];
    for (int i = 0; i < TILE; i += 2) {
        const __m512 even = _mm512_load_ps(from[i]), odd = _mm512_load_ps(from[i + 1]);
        pairs[i] = _mm512_unpacklo_ps(even, odd);
        pairs[i + 1] = _mm512_unpackhi_ps(even, odd);
    }
    for (int i = 0; i < TILE; i += 4)
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + j + 2]);
            fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int k = 0; k < 4; ++k) {  // a register has its four lanes from the k-th of every four
        const __m512 low[2] = {_mm512_shuffle_f32x4(fours[k], fours[k + 4], 0x44),
                               _mm512_shuffle_f32x4(fours[k + 8], fours[k + 12], 0x44)};
        const __m512 high[2] = {_mm512_shuffle_f32x4(fours[k], fours[k + 4], 0xEE),
                                _mm512_shuffle_f32x4(fours[k + 8], fours[k + 12], 0xEE)};
        _mm512_storeu_ps(to + k * stride, _mm512_shuffle_f32x4(low[0], low[1], 0x88));
        _mm512_storeu_ps(to + (k + 4) * stride, _mm512_shuffle_f32x4(low[0], low[1], 0xDD));
        _mm512_storeu_ps(to + (k + 8) * stride, _mm512_shuffle_f32x4(high[0], high[1], 0x88));
        _mm512_storeu_ps(to + (k + 12) * stride, _mm512_shuffle_f32x4(high[0], high[1], 0xDD));
    }
}

// What a thread needs to let up to 16 queries look at one head's keys and values.
class Attention {
   public:
    Attention(int64_t length, int64_t head_dim)
        : size_(head_dim), room_((length + 31) / 32 * 32), queries_(TILE * head_dim), tail_(32 * head_dim),
          scores_(TILE * room_), weights_(TILE * room_),
          packed_(TILE * head_dim) {}

    // the place of a query, 0 to 15
    bf16* query(int64_t index) { return queries_.data() + index * size_; }

    // keys, values: [places, head_dim]; query i sees the first lengths[i] of them. Calls take(i, begin, low, high) with
    // what query i comes to in dimensions [begin, begin + 32).
    template <class Take>
    void attend(const bf16* keys, const bf16* values, const int64_t* lengths, int64_t num_queries, Take take) {
        const int64_t length = *std::max_element(lengths, lengths + num_queries);
        const int64_t rounded_length = (length + 31) / 32 * 32;
        score(keys, length);
        float inverses[TILE];
        for (int64_t i = 0; i < num_queries; ++i)
            inverses[i] = 1.f / normalise(scores_.data() + i * room_, lengths[i], rounded_length, weights_.data() + i * room_);
        for (int64_t begin = 0; begin < size_; begin += 32) {
            alignas(64) float sums[2][TILE][WIDTH];
            alignas(64) bf16 pairs[2][TILE][2 * WIDTH];
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t place = 0; place < length; place += 32) {
                const bf16* from = whole(values, place, length, 32) + begin;
                // pairs of places side by side; what this does to the order of dimensions is undone below
                for (int64_t pair = 0; pair < TILE; ++pair) {
                    const __m512i even = _mm512_loadu_si512(from + 2 * pair * size_);
                    const __m512i odd = _mm512_loadu_si512(from + (2 * pair + 1) * size_);
                    _mm512_store_si512(pairs[0][pair], _mm512_unpacklo_epi16(even, odd));
                    _mm512_store_si512(pairs[1][pair], _mm512_unpackhi_epi16(even, odd));
                }
                written();
                _tile_loadd(2, weights_.data() + place, room_ * sizeof(bf16));
                _tile_loadd(3, pairs[0], 64);
                _tile_loadd(4, pairs[1], 64);
                _tile_dpbf16ps(0, 2, 3);
                _tile_dpbf16ps(1, 2, 4);
                written();  // before it is written to again
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
            for (int64_t i = 0; i < num_queries; ++i) {
                const __m512 inverse = _mm512_set1_ps(inverses[i]);
                const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums[0][i]), inverse);
                const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums[1][i]), inverse);
                take(i, begin, _mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high));
            }
        }
    }

   private:
    // scores_[query, place]; keys are rows of a tile as they lie in the cache, queries its pairs of columns
    void score(const bf16* keys, int64_t length) {
        alignas(64) float sums[TILE][WIDTH];
        alignas(64) float pairs[TILE][WIDTH];  // [pair of dimensions, query]
        for (int64_t begin = 0; begin < size_; begin += 32) {
            for (int64_t i = 0; i < TILE; ++i) std::memcpy(pairs[i], queries_.data() + i * size_ + begin, 64);
            transpose(pairs, reinterpret_cast<float*>(packed_.data() + begin * TILE), WIDTH);
        }
        for (int64_t place = 0; place < length; place += TILE) {
            const bf16* from = whole(keys, place, length, TILE);
            written();
            _tile_zero(0);
            for (int64_t begin = 0; begin < size_; begin += 32) {
                _tile_loadd(2, from + begin, size_ * sizeof(bf16));
                _tile_loadd(3, packed_.data() + begin * TILE, 64);
                _tile_dpbf16ps(0, 2, 3);
            }
            _tile_stored(0, sums, 64);
            transpose(sums, scores_.data() + place, room_);
        }
    }

    // `count` rows from a place on; a copy where not so many are left, since what lies behind them is not ours
    const bf16* whole(const bf16* rows, int64_t place, int64_t length, int64_t count) {
        const int64_t left = length - place;
        if (left >= count) return rows + place * size_;
        std::memcpy(tail_.data(), rows + place * size_, left * size_ * sizeof(bf16));
        std::memset(tail_.data() + left * size_, 0, (count - left) * size_ * sizeof(bf16));
        return tail_.data();
    }

    // weights: e^(score - the largest) of the first `length`, zeros up to `room`; their sum
    float normalise(const float* scores, int64_t length, int64_t room, bf16* weights) {
        const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(float(size_)));
        __m512 largest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int64_t place = 0; place < length; place += WIDTH)
            largest = _mm512_mask_max_ps(largest, inside(length - place), largest, _mm512_loadu_ps(scores + place));
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
        for (int64_t place = 0; place < room; place += WIDTH) {
            const __m512 score = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + place), most), scale);
            const __m512 weight = _mm512_maskz_mov_ps(inside(length - place), exponential(score));
            store(weights + place, weight);
            total = _mm512_add_ps(total, weight);
        }
        return _mm512_reduce_add_ps(total);
    }

    static __mmask16 inside(int64_t count) {
        return __mmask16(count >= WIDTH ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    }

    const int64_t size_, room_;
    std::vector<bf16> queries_, tail_;
    std::vector<float> scores_;
    std::vector<bf16> weights_, packed_;
};

}  // namespace

extern "C" {

// Asks Linux for the tiles; 0 if they are granted.
int64_t request_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

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
        const Tiles tiles;
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
