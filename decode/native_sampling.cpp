// Choosing tokens out of whole vocabularies, a row of logits at a time and read from memory once.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "native.h"

namespace {

// log(1 + x) by the series of the inverse hyperbolic tangent; x in [-1/4, 1/2], relative error below 1e-6
inline __m512 log_of_one_plus(__m512 x) {
    const __m512 ratio = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(2.f), x));
    const __m512 square = _mm512_mul_ps(ratio, ratio);
    __m512 sum = _mm512_set1_ps(2.f / 9);
    for (const float coefficient : {2.f / 7, 2.f / 5, 2.f / 3, 2.f})
        sum = _mm512_fmadd_ps(sum, square, _mm512_set1_ps(coefficient));
    return _mm512_mul_ps(sum, ratio);
}

// -log(1 - x), x in (0, 1)
inline __m512 arrival(__m512 x) {
    const __m512 left = _mm512_sub_ps(_mm512_set1_ps(1.f), x);
    const __m512i three_quarters = _mm512_set1_epi32(0x3f400000);  // left = 2^n m, m in [3/4, 3/2)
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(left), three_quarters);
    const __m512i n = _mm512_srai_epi32(bits, 23);
    const __m512i rest = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff));
    const __m512 m = _mm512_castsi512_ps(_mm512_add_epi32(rest, three_quarters));
    // where n is 0, 1 - x has lost what x had
    const __mmask16 near = _mm512_cmpeq_epi32_mask(n, _mm512_setzero_si512());
    const __m512 beyond = _mm512_sub_ps(m, _mm512_set1_ps(1.f));
    const __m512 log_m = log_of_one_plus(_mm512_mask_sub_ps(beyond, near, _mm512_setzero_ps(), x));
    return _mm512_fnmsub_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.69314718f), log_m);
}

// `RowNoise.exponentials` of noise.py for 16 tokens
inline __m512 noise(__m512i spread, __m512i first, __m512i second) {
    __m512i mixed = _mm512_mullo_epi32(_mm512_xor_si512(spread, first), second);
    mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 15));
    mixed = _mm512_mullo_epi32(mixed, _mm512_set1_epi32(int32_t(0xC2B2AE35)));
    mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32(mixed, 16));
    const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(mixed, _mm512_set1_epi32(0x7FFFFF7F)));
    return arrival(_mm512_mul_ps(_mm512_add_ps(number, _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-31f)));
}

inline __mmask16 inside(int64_t count) { return __mmask16(count >= WIDTH ? 0xffff : (1 << count) - 1); }

inline __m512 load(const bf16* x, __mmask16 mask) {
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

float largest_of(const bf16* logits, int64_t size) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += WIDTH) {
        const __mmask16 mask = inside(size - i);
        largest = _mm512_mask_max_ps(largest, mask, largest, load(logits + i, mask));
    }
    return _mm512_reduce_max_ps(largest);
}

// Which token arrives first, if token x arrives after a time exponential with rate weight[x].
class First {
   public:
    First(uint64_t key, const int32_t* spread)
        : spread_(spread), first_(_mm512_set1_epi32(int32_t(key))), second_(_mm512_set1_epi32(int32_t(key >> 32) | 1)) {}

    void look_at(int64_t place, __mmask16 mask, __m512 weights) {
        const __m512i here = _mm512_add_epi32(_mm512_set1_epi32(int32_t(place)), lanes());
        const __m512 times = noise(_mm512_maskz_loadu_epi32(mask, spread_ + place), first_, second_);
        const __m512 speeds = _mm512_div_ps(weights, times);
        const __mmask16 faster = _mm512_mask_cmp_ps_mask(mask, speeds, fastest_, _CMP_GT_OQ);
        fastest_ = _mm512_mask_mov_ps(fastest_, faster, speeds);
        places_ = _mm512_mask_mov_epi32(places_, faster, here);
    }

    int64_t token() const {
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(fastest_));
        return _mm512_mask_reduce_min_epu32(_mm512_cmp_ps_mask(fastest_, most, _CMP_EQ_OQ), places_);
    }

   private:
    static __m512i lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    const int32_t* spread_;
    const __m512i first_, second_;
    __m512 fastest_ = _mm512_set1_ps(-1.f);
    __m512i places_ = _mm512_setzero_si512();
};

}  // namespace

extern "C" {

// softmax(logits / temperature) of each row, and a token of each drawn from it as `sample` of sampling.py does.
//
// logits: [num_rows, size], rows `stride` apart. temperatures: [num_rows]. probabilities: [num_rows, size], or null.
// keys: of the noise, [num_rows]; spread: [size], of each token; tokens: [num_rows]; all three may be null.
void draw(const bf16* logits, int64_t num_rows, int64_t size, int64_t stride, const float* temperatures,
          float* probabilities, const uint64_t* keys, const int32_t* spread, int64_t* tokens, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(int(std::min(num_threads, num_rows)))
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* of_row = logits + row * stride;
        const __m512 largest = _mm512_set1_ps(largest_of(of_row, size));
        const __m512 scale = _mm512_set1_ps(1.f / temperatures[row]);
        const auto weigh = [&](int64_t i, __mmask16 mask) {
            const __m512 x = _mm512_mul_ps(_mm512_sub_ps(load(of_row + i, mask), largest), scale);
            // below that, e^x is no normal number
            return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_GT_OQ), exponential(x));
        };
        if (tokens) {
            First first(keys[row], spread);
            for (int64_t i = 0; i < size; i += WIDTH) first.look_at(i, inside(size - i), weigh(i, inside(size - i)));
            tokens[row] = first.token();
        }
        if (probabilities) {
            float* to = probabilities + row * size;
            __m512 total = _mm512_setzero_ps();
            for (int64_t i = 0; i < size; i += WIDTH) {
                const __mmask16 mask = inside(size - i);
                const __m512 weight = weigh(i, mask);
                _mm512_mask_storeu_ps(to + i, mask, weight);
                total = _mm512_mask_add_ps(total, mask, total, weight);
            }
            const __m512 inverse = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(total));
            for (int64_t i = 0; i < size; i += WIDTH) {
                const __mmask16 mask = inside(size - i);
                _mm512_mask_storeu_ps(to + i, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, to + i), inverse));
            }
        }
    }
}

// logsumexp of each row of logits [num_rows, size], whose rows are `stride` apart: sums [num_rows].
void log_sum_exp(const bf16* logits, int64_t num_rows, int64_t size, int64_t stride, float* sums, int64_t num_threads) {
#pragma omp parallel for num_threads(int(num_threads))
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* of_row = logits + row * stride;
        const float largest = largest_of(of_row, size);
        __m512 total = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += WIDTH) {
            const __mmask16 mask = inside(size - i);
            const __m512 weight = exponential(_mm512_sub_ps(load(of_row + i, mask), _mm512_set1_ps(largest)));
            total = _mm512_mask_add_ps(total, mask, total, weight);
        }
        sums[row] = largest + std::log(_mm512_reduce_add_ps(total));
    }
}
}
