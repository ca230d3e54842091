// Choosing tokens out of whole vocabularies, a row of logits at a time and read from memory once.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "native_sampling.h"

namespace {

float largest_of(const bf16* logits, int64_t size) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += WIDTH) {
        const __mmask16 mask = inside(size - i);
        largest = _mm512_mask_max_ps(largest, mask, largest, load(logits + i, mask));
    }
    return _mm512_reduce_max_ps(largest);
}

// The largest place in [least, most] for which enough(place) holds; it holds for `least`, and below where it holds.
template <class Enough>
uint16_t largest_place(uint16_t least, uint16_t most, Enough enough) {
    while (least < most) {
        const uint16_t middle = uint16_t((uint32_t(least) + most + 1) / 2);
        if (enough(middle))
            least = middle;
        else
            most = middle - 1;
    }
    return least;
}

// bf16 numbers by their place in the order of numbers
float number_at(uint16_t place) {
    const uint32_t bits = uint32_t(place & 0x8000 ? place ^ 0x8000 : place ^ 0xffff) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

uint16_t place_of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return uint16_t(bits >> 16) ^ (bits >> 31 ? 0xffff : 0x8000);
}

// Some logits of a row and their weights.
class Candidates {
   public:
    void take(const bf16* logits, int64_t size, float bound, float largest, float scale) {
        count_ = 0;
        numbers_.resize(size + WIDTH);
        weights_.resize(size + WIDTH);
        for (int64_t i = 0; i < size; i += WIDTH) {
            const __mmask16 mask = inside(size - i);
            const __m512 numbers = load(logits + i, mask);
            keep(_mm512_mask_cmp_ps_mask(mask, numbers, _mm512_set1_ps(bound), _CMP_GE_OQ), numbers,
                 weights_of(numbers, largest, scale));
        }
    }

    // only those whose numbers and weights are not below these
    void reduce(float number, float weight) {
        const int64_t count = count_;
        count_ = 0;
        for (int64_t i = 0; i < count; i += WIDTH) {
            const __m512 numbers = _mm512_loadu_ps(&numbers_[i]), weights = _mm512_loadu_ps(&weights_[i]);
            keep(_mm512_mask_cmp_ps_mask(inside(count - i), numbers, _mm512_set1_ps(number), _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(weights, _mm512_set1_ps(weight), _CMP_GE_OQ),
                 numbers, weights);
        }
    }

    int64_t count() const { return count_; }

    // of the numbers whose weights are not below this one; infinite if there is none
    float least(float weight) const {
        float least = INFINITY;
        for (int64_t i = 0; i < count_; ++i)
            if (weights_[i] >= weight) least = std::min(least, numbers_[i]);
        return least;
    }

    // of the weights of numbers that are not below this one
    float total(float bound) const {
        __m512 total = _mm512_setzero_ps();
        for (int64_t i = 0; i < count_; i += WIDTH) {
            const __m512 numbers = _mm512_loadu_ps(&numbers_[i]);
            const __mmask16 mask =
                _mm512_mask_cmp_ps_mask(inside(count_ - i), numbers, _mm512_set1_ps(bound), _CMP_GE_OQ);
            total = _mm512_mask_add_ps(total, mask, total, _mm512_loadu_ps(&weights_[i]));
        }
        return _mm512_reduce_add_ps(total);
    }

   private:
    void keep(__mmask16 mask, __m512 numbers, __m512 weights) {
        // whole registers, compressed before: a compressed store takes many times as long
        _mm512_storeu_ps(&numbers_[count_], _mm512_maskz_compress_ps(mask, numbers));
        _mm512_storeu_ps(&weights_[count_], _mm512_maskz_compress_ps(mask, weights));
        count_ += _mm_popcnt_u32(mask);
    }

    int64_t count_ = 0;
    std::vector<float> numbers_, weights_;
};

int64_t count_from(const bf16* logits, int64_t size, float bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += WIDTH) {
        const __mmask16 mask = inside(size - i);
        count += _mm_popcnt_u32(
            _mm512_mask_cmp_ps_mask(mask, load(logits + i, mask), _mm512_set1_ps(bound), _CMP_GE_OQ));
    }
    return count;
}

// All of a row: nothing is truncated.
Kept whole(const bf16* logits, int64_t size, float largest, float scale) {
    __m512 total = _mm512_setzero_ps();
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += WIDTH) {
        const __m512 numbers = load(logits + i, inside(size - i));
        const __mmask16 mask = _mm512_mask_cmp_ps_mask(inside(size - i), numbers, numbers, _CMP_ORD_Q);
        total = _mm512_mask_add_ps(total, mask, total, weights_of(numbers, largest, scale));
        count += _mm_popcnt_u32(mask);
    }
    const float sum = _mm512_reduce_add_ps(total);
    if (!(sum > 0)) return {largest, largest, 1.f, 0};  // nothing is a number
    return {-INFINITY, largest, sum, count};
}

}  // namespace

Kept truncated(const bf16* logits, int64_t size, float temperature, int64_t top_k, float top_p, float min_p) {
    static thread_local Candidates candidates;  // new memory would cost a page fault for each of its pages
    const float largest = largest_of(logits, size);
    if (temperature == 0) return {largest, largest, 1.f, largest == largest};  // none of a row without numbers
    if (!(0 < top_k && top_k < size) && top_p >= 1 && min_p <= 0) return whole(logits, size, largest, 1.f / temperature);
    uint16_t place = place_of(-INFINITY);
    if (0 < top_k && top_k < size)
        place = largest_place(place, place_of(largest),
                              [&](uint16_t at) { return count_from(logits, size, number_at(at)) >= top_k; });
    candidates.take(logits, size, number_at(place), largest, 1.f / temperature);
    if (top_p < 1) {
        const float total = candidates.total(-INFINITY), wanted = top_p * total;
        // tokens less likely than that have, together, less than half of what is to be left out
        candidates.reduce(-INFINITY, (total - wanted) / (2 * float(size)));
        place = largest_place(place, place_of(largest),
                              [&](uint16_t at) { return candidates.total(number_at(at)) >= wanted; });
        candidates.reduce(number_at(place), 0.f);
    }
    const float bound = candidates.least(min_p);
    candidates.reduce(bound, 0.f);
    if (candidates.count() == 0) return {largest, largest, 1.f, 0};  // nothing is a number
    return {bound, largest, candidates.total(bound), candidates.count()};
}

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
        const float largest = largest_of(of_row, size), scale = 1.f / temperatures[row];
        const auto weigh = [&](int64_t i, __mmask16 mask) { return weights_of(load(of_row + i, mask), largest, scale); };
        if (tokens) {
            First first(keys[row]);
            for (int64_t i = 0; i < size; i += WIDTH) {
                const __mmask16 mask = inside(size - i);
                first.look_at(i, mask, weigh(i, mask), _mm512_maskz_loadu_epi32(mask, spread + i));
            }
            tokens[row] = first.place();
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
        double total = 0;
        for (int64_t begin = 0; begin < size; begin += 1024) {  // more, and a large sum would swallow small numbers
            __m512 of_some = _mm512_setzero_ps();
            for (int64_t i = begin; i < std::min(begin + 1024, size); i += WIDTH) {
                const __mmask16 mask = inside(size - i);
                of_some = _mm512_mask_add_ps(of_some, mask, of_some, weights_of(load(of_row + i, mask), largest, 1.f));
            }
            total += _mm512_reduce_add_ps(of_some);
        }
        sums[row] = largest + float(std::log(total));
    }
}

// What top-k, top-p and min-p leave of each row, as `LogitsWarper` of sampling.py has it: kept [num_rows].
void bound_rows(const bf16* logits, int64_t num_rows, int64_t size, int64_t stride, const float* temperatures,
                const int64_t* top_k, const float* top_p, const float* min_p, Kept* kept, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(int(std::min(num_threads, num_rows)))
    for (int64_t row = 0; row < num_rows; ++row)
        kept[row] = truncated(logits + row * stride, size, temperatures[row], top_k[row], top_p[row], min_p[row]);
}

// Their probabilities and tokens, [num_rows, num_columns] each, which no row has more of; where one has fewer, other
// tokens with probability 0 follow.
void spread_out(const bf16* logits, int64_t num_rows, int64_t size, int64_t stride, const float* temperatures,
                const Kept* kept, int64_t num_columns, float* probabilities, int64_t* tokens) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const Kept& of_row = kept[row];
        int64_t column = row * num_columns, left = of_row.count, other = column + left;
        const int64_t end = column + num_columns;
        for (int64_t i = 0; i < size && (left || other < end); i += WIDTH) {
            const __m512 numbers = load(logits + row * stride + i, inside(size - i));
            const __mmask16 mask =
                _mm512_mask_cmp_ps_mask(inside(size - i), numbers, _mm512_set1_ps(of_row.bound), _CMP_GE_OQ);
            if (!mask && other == end) continue;
            alignas(64) float weights[WIDTH];
            _mm512_store_ps(weights, temperatures[row] == 0
                                         ? _mm512_set1_ps(1.f)
                                         : weights_of(numbers, of_row.largest, 1.f / temperatures[row]));
            for (int64_t lane = 0; lane < std::min(WIDTH, size - i); ++lane) {
                if (mask >> lane & 1 && left) {
                    probabilities[column] = weights[lane] / of_row.total;
                    tokens[column++] = i + lane;
                    --left;
                } else if (other < end) {
                    probabilities[other] = 0;
                    tokens[other++] = i + lane;
                }
            }
        }
    }
}

// `sample` of sampling.py: of each row the column whose token arrives first.
//
// weights: [num_rows, num_columns]. spread: of the columns' tokens, rows `spread_stride` apart, which may be 0.
void arrive(const float* weights, int64_t num_rows, int64_t num_columns, const int32_t* spread, int64_t spread_stride,
            const uint64_t* keys, int64_t* columns, int64_t num_threads) {
    const int64_t num_useful = num_columns < 4096 ? 1 : std::min(num_threads, num_rows);
#pragma omp parallel for schedule(dynamic) num_threads(int(num_useful))
    for (int64_t row = 0; row < num_rows; ++row) {
        First first(keys[row]);
        for (int64_t i = 0; i < num_columns; i += WIDTH) {
            const __mmask16 mask = inside(num_columns - i);
            first.look_at(i, mask, _mm512_maskz_loadu_ps(mask, weights + row * num_columns + i),
                          _mm512_maskz_loadu_epi32(mask, spread + row * spread_stride + i));
        }
        columns[row] = first.place();
    }
}
}
