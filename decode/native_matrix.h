// What both ways of multiplying share: how weights lie in memory, inputs of 8 bits, transposes and softmax.
#pragma once
#include <algorithm>
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

// [16, 16] to its transpose, whose rows are `stride` apart.
inline void transpose(const float (&from)[TILE][WIDTH], float* to, int64_t stride) {
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

// weights: e^(scale (score - the largest)) of the first `length`, zeros up to `room`; their sum
template <class Number>
float exponentials(const float* scores, int64_t length, int64_t room, float scale, Number* weights) {
    __m512 largest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t place = 0; place < length; place += WIDTH)
        largest = _mm512_mask_max_ps(largest, inside(length - place), largest, _mm512_loadu_ps(scores + place));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t place = 0; place < room; place += WIDTH) {
        const __m512 score = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + place), most), _mm512_set1_ps(scale));
        const __m512 weight = _mm512_maskz_mov_ps(inside(length - place), exponential(score));
        store(weights + place, weight);
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}

// `count` rows [places, size] from a place on; a copy where not so many are left, since what lies behind them is not ours
inline const bf16* whole_rows(const bf16* rows, int64_t size, int64_t place, int64_t length, int64_t count,
                              std::vector<bf16>& copy) {
    const int64_t left = length - place;
    if (left >= count) return rows + place * size;
    std::memcpy(copy.data(), rows + place * size, left * size * sizeof(bf16));
    std::memset(copy.data() + left * size, 0, (count - left) * size * sizeof(bf16));
    return copy.data();
}
