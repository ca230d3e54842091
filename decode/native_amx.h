// Products by the matrix units of a CPU (AMX): a tile of 16 tokens with one of 16 outputs.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "native_matrix.h"

// Asks Linux for the tiles; 0 if they are granted.
inline int64_t grant_units() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */); }

// The compiler does not know that tiles, and what they are to be, are read from memory.
inline void written() { asm volatile("" ::: "memory"); }

// The tiles of a thread belong to whoever set them up last, such as oneDNN: they are given back as they were.
class Units {
   public:
    Units() {
        _tile_storeconfig(&before_);
        Config ours{1, 0, {}, {}, {}, {}, {}};
        for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.rows[tile] = TILE;
        written();
        _tile_loadconfig(&ours);
    }
    ~Units() {
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

template <class Take>
void multiply_tiles(const Matrix& matrix, int64_t begin, int64_t end, const bf16* x, int64_t stride, int64_t num_tokens,
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

// What a matrix is multiplied with: tokens [num_tokens, stride], readable up to a multiple of 16.
class Inputs {
   public:
    void take(const Matrix& matrix, const bf16* x, int64_t stride, int64_t num_tokens) {
        x_ = x, stride_ = stride, num_tokens_ = num_tokens;
        if (matrix.bits != 16) rounded_.take(x, stride, num_tokens, matrix.num_inputs);
    }

    // Calls take(block, token, products with that block, with the next) for blocks [begin, end), an even number.
    template <class Take>
    void multiply(const Matrix& matrix, int64_t begin, int64_t end, Take take) const {
        if (matrix.bits == 16)
            multiply_tiles(matrix, begin, end, x_, stride_, num_tokens_, take);
        else if (matrix.bits == 8)
            multiply_quantised<8>(matrix, begin, end, rounded_, num_tokens_, take);
        else
            multiply_quantised<4>(matrix, begin, end, rounded_, num_tokens_, take);
    }

   private:
    const bf16* x_;
    int64_t stride_, num_tokens_;
    Rounded rounded_;
};

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
        const float scale = 1.f / std::sqrt(float(size_));
        float inverses[TILE];
        for (int64_t i = 0; i < num_queries; ++i)
            inverses[i] = 1.f / exponentials(scores_.data() + i * room_, lengths[i], rounded_length, scale, weights_.data() + i * room_);
        for (int64_t begin = 0; begin < size_; begin += 32) {
            alignas(64) float sums[2][TILE][WIDTH];
            alignas(64) bf16 pairs[2][TILE][2 * WIDTH];
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t place = 0; place < length; place += 32) {
                const bf16* from = whole_rows(values, size_, place, length, 32, tail_) + begin;
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
            const bf16* from = whole_rows(keys, size_, place, length, TILE, tail_);
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

    const int64_t size_, room_;
    std::vector<bf16> queries_, tail_;
    std::vector<float> scores_;
    std::vector<bf16> weights_, packed_;
};
