// A round of speculative decoding but for the target's pass: what drafts one token after another, and the verdict.
//
// Distributions stay what they are made of, logits and a bound on them, and only the probabilities that are asked for are
// computed. The rules are those of verify.py, and of `sample` in sampling.py.
#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <vector>

#include "native_sampling.h"

extern "C" {
// Distributions of some positions of each row.
struct Rows {
    const bf16* logits;  // of a position, [size]; positions and rows lie apart by their strides
    int64_t row_stride, position_stride, size;
    const float* temperatures;  // this and the next three: [rows]
    const int64_t* top_k;
    const float *top_p, *min_p;
    const int64_t* tokens;  // of the columns, [size]; null where column i is token i
    Kept* kept;             // [rows, positions], or null where nothing is known yet
    int64_t num_positions;
};
enum Rule : int64_t { EQUAL, TOKENWISE, BLOCK };
struct Model;
int64_t forward(const Model* model, bf16* const* keys, bf16* const* values, int64_t capacity, int64_t num_rows,
                int64_t width, const int64_t* tokens, const bf16* entering, const int64_t* places, const bf16* cos,
                const bf16* sin, bf16* last, bf16* logits, int64_t num_threads);
}

namespace {

float number_of(bf16 bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int32_t(bits) << 16))); }

// One distribution: softmax(logits / temperature) of what is left of them.
class Distribution {
   public:
    Distribution(const Rows& rows, int64_t row, int64_t position)
        : logits_(rows.logits + row * rows.row_stride + position * rows.position_stride), size_(rows.size),
          temperature_(rows.temperatures[row]), tokens_(rows.tokens),
          kept_(&rows.kept[row * rows.num_positions + position]) {}

    void truncate(const Rows& rows, int64_t row) {
        *kept_ = truncated(logits_, size_, temperature_, rows.top_k[row], rows.top_p[row], rows.min_p[row]);
    }

    int64_t size() const { return size_; }
    int64_t token(int64_t column) const { return tokens_ ? tokens_[column] : column; }

    // of 16 columns; 0 beyond the last of them
    __m512 probabilities(int64_t column) const {
        const __mmask16 mask = inside(size_ - column);
        return of_numbers(mask, load(logits_ + column, mask));
    }

    // of one column; 0 of one that is not there
    float probability(int64_t column) const {
        if (column < 0 || column >= size_) return 0.f;
        return _mm512_cvtss_f32(of_numbers(1, _mm512_set1_ps(number_of(logits_[column]))));
    }

    // of 16 tokens, where columns are tokens
    __m512 probabilities(const int64_t (&tokens)[WIDTH], __mmask16 mask) const {
        alignas(64) float numbers[WIDTH];
        for (int64_t lane = 0; lane < WIDTH; ++lane) {
            const bool is_there = mask >> lane & 1 && tokens[lane] >= 0 && tokens[lane] < size_;
            numbers[lane] = is_there ? number_of(logits_[tokens[lane]]) : NAN;  // which no bound lets through
        }
        return of_numbers(mask, _mm512_load_ps(numbers));
    }

    // of one token; 0 of one that no column has
    float probability_of(int64_t token) const {
        if (!tokens_) return probability(token);
        const int64_t* found = std::find(tokens_, tokens_ + size_, token);
        return found == tokens_ + size_ ? 0.f : probability(found - tokens_);
    }

    // the column whose token arrives first; the first of the largest at temperature 0, and 0 where nothing is a number
    int64_t choose(uint64_t key, const int32_t* spread) const {
        if (kept_->count == 0) return 0;
        First first(key);
        for (int64_t i = 0; i < size_; i += WIDTH) {
            const __mmask16 mask = inside(size_ - i);
            const __m512 numbers = load(logits_ + i, mask);
            const __mmask16 here = _mm512_mask_cmp_ps_mask(mask, numbers, _mm512_set1_ps(kept_->bound), _CMP_GE_OQ);
            if (!here) continue;
            if (temperature_ == 0) return i + __builtin_ctz(here);
            first.look_at(i, here, weights_of(numbers, kept_->largest, 1.f / temperature_),
                          _mm512_maskz_loadu_epi32(mask, spread + i));
        }
        return first.place();
    }

   private:
    __m512 of_numbers(__mmask16 mask, __m512 numbers) const {
        const __mmask16 left = _mm512_mask_cmp_ps_mask(mask, numbers, _mm512_set1_ps(kept_->bound), _CMP_GE_OQ);
        if (!left || kept_->count == 0) return _mm512_setzero_ps();
        const __m512 weights = weights_of(numbers, kept_->largest, 1.f / temperature_);
        return _mm512_maskz_mul_ps(left, weights, _mm512_set1_ps(1.f / kept_->total));
    }

    const bf16* logits_;
    int64_t size_;
    float temperature_;
    const int64_t* tokens_;
    Kept* kept_;
};

// Calls take(tokens, p, q, columns that q has) for all columns of q, 16 at a time.
template <class Take>
void for_shared(const Distribution& p, const Distribution& q, Take take) {
    for (int64_t column = 0; column < q.size(); column += WIDTH) {
        const __m512 of_q = q.probabilities(column);
        const __mmask16 mask = _mm512_cmp_ps_mask(of_q, _mm512_setzero_ps(), _CMP_GT_OQ);
        if (!mask) continue;
        int64_t tokens[WIDTH];
        for (int64_t lane = 0; lane < WIDTH; ++lane) tokens[lane] = mask >> lane & 1 ? q.token(column + lane) : -1;
        take(tokens, p.probabilities(tokens, mask), of_q);
    }
}

// sum_x (scale p(x) - q(x))+
float excess_mass(const Distribution& p, const Distribution& q, float scale) {
    __m512 excess = _mm512_setzero_ps(), shared = _mm512_setzero_ps();
    for_shared(p, q, [&](const int64_t (&)[WIDTH], __m512 of_p, __m512 of_q) {
        shared = _mm512_add_ps(shared, of_p);
        const __m512 left = _mm512_fmsub_ps(_mm512_set1_ps(scale), of_p, of_q);
        excess = _mm512_add_ps(excess, _mm512_max_ps(left, _mm512_setzero_ps()));
    });
    // of what q has not, all is left
    return _mm512_reduce_add_ps(excess) + scale * std::max(0.f, 1.f - _mm512_reduce_add_ps(shared));
}

// A token drawn from (scale p - q)+, or from p where rounding leaves nothing of it.
int64_t choose_from_excess(const Distribution& p, const Distribution& q, float scale, uint64_t key, const int32_t* spread) {
    static thread_local std::vector<float> left;
    left.resize(p.size() + WIDTH);
    for (int64_t i = 0; i < p.size(); i += WIDTH)
        _mm512_storeu_ps(&left[i], _mm512_mul_ps(_mm512_set1_ps(scale), p.probabilities(i)));
    for_shared(p, q, [&](const int64_t (&tokens)[WIDTH], __m512, __m512 of_q) {
        alignas(64) float taken[WIDTH];
        _mm512_store_ps(taken, of_q);
        for (int64_t lane = 0; lane < WIDTH; ++lane)
            if (const int64_t token = tokens[lane]; token >= 0 && token < p.size())
                left[token] = std::max(0.f, left[token] - taken[lane]);
    });
    First first(key);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < p.size(); i += WIDTH) {
        const __mmask16 mask = inside(p.size() - i);
        const __m512 weights = _mm512_maskz_loadu_ps(mask, &left[i]);
        const __mmask16 here = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_GT_OQ);
        if (!here) continue;
        total = _mm512_add_ps(total, weights);
        first.look_at(i, here, weights, _mm512_maskz_loadu_epi32(mask, spread + i));
    }
    return _mm512_reduce_add_ps(total) >= FLT_MIN ? first.place() : p.choose(key, spread);
}

struct Verdict {
    int64_t num_accepted, next_token;
};

Verdict judged(const Rows& of_p, const Rows* of_q, int64_t row, Rule rule, const int64_t* drafted, int64_t num_drafted,
               const float* coins, const uint64_t* token_keys, uint64_t next_key, const int32_t* spread) {
    const auto p = [&](int64_t position) { return Distribution(of_p, row, position); };
    const auto q = [&](int64_t position) { return Distribution(*of_q, row, position); };
    if (rule == EQUAL)
        for (int64_t k = 0;; ++k)
            if (const int64_t token = p(k).choose(token_keys[k], spread); k == num_drafted || token != drafted[k])
                return {k, token};
    int64_t num_accepted = 0;
    float scale = 1.f;
    if (rule == TOKENWISE) {
        for (; num_accepted < num_drafted; ++num_accepted) {
            const int64_t token = drafted[num_accepted];
            const float of_q = q(num_accepted).probability_of(token);
            // nothing is drafted with q = 0, unless the draft's logits are no numbers
            if (!(of_q > 0 && coins[num_accepted] * of_q < p(num_accepted).probability(token))) break;
        }
    } else {
        float reached = 1.f;
        for (int64_t k = 1; k <= num_drafted; ++k) {
            const int64_t token = drafted[k - 1];
            const float of_q = q(k - 1).probability_of(token);
            reached = std::min(of_q > 0 ? reached * p(k - 1).probability(token) / of_q : 0.f, 1.f);
            const float mass = k < num_drafted ? excess_mass(p(k), q(k), reached) : reached;
            if (coins[k - 1] < mass / std::max(mass + (1.f - reached), FLT_MIN)) num_accepted = k, scale = reached;
        }
    }
    const int64_t next = num_accepted == num_drafted
                             ? p(num_accepted).choose(next_key, spread)
                             : choose_from_excess(p(num_accepted), q(num_accepted), scale, next_key, spread);
    return {num_accepted, next};
}

}  // namespace

extern "C" {

// Drafts num_steps tokens of each row, the first from the logits of position 0 in `rows`, the others from those that the
// model then has, which are written behind them: rows.position_stride is num_rows times its width, rows.row_stride one.
//
// places: [num_rows], where in the caches the first drafted token belongs; keys, values, cos and sin as for `forward`.
// noise: [num_rows, num_steps], and spread: [rows.size], as for `arrive`. tokens: [num_rows, num_steps], written.
// most: no token above it is read, since the model has no more. hidden: [num_rows, hidden_size], overwritten. seconds:
// those of passes are added to it.
int64_t draft(const Model* model, bf16* const* keys, bf16* const* values, int64_t capacity, int64_t num_rows,
              int64_t num_steps, const int64_t* places, const bf16* cos, const bf16* sin, const Rows* rows,
              const uint64_t* noise, const int32_t* spread, int64_t* tokens, int64_t most, bf16* hidden,
              double* seconds, int64_t num_threads) {
    std::vector<int64_t> fed(num_rows), at(places, places + num_rows);
    for (int64_t step = 0; step < num_steps; ++step) {
        for (int64_t row = 0; row < num_rows; ++row) {
            Distribution q(*rows, row, step);
            q.truncate(*rows, row);
            const int64_t token = q.token(q.choose(noise[row * num_steps + step], spread));
            tokens[row * num_steps + step] = token;
            fed[row] = std::min(token, most);
        }
        if (step + 1 == num_steps) break;
        bf16* const to = const_cast<bf16*>(rows->logits) + (step + 1) * rows->position_stride;
        const double began = omp_get_wtime();
        if (forward(model, keys, values, capacity, num_rows, 1, fed.data(), nullptr, at.data(), cos, sin, hidden, to,
                    num_threads))
            return 1;
        *seconds += omp_get_wtime() - began;
        for (int64_t& place : at) ++place;
    }
    return 0;
}

// How many drafted tokens of each row are accepted, and the token that follows them: verdicts [num_rows, 2].
//
// p: num_drafted + 1 positions or more; q: null where all rows have the rule EQUAL. drafted: [num_rows, width].
// num_drafted, rules, next_keys: [num_rows]. coins: [num_rows, width]. token_keys: [num_rows, width + 1], of which EQUAL
// makes use, as the others do of coins and next_keys. spread: [p.size].
void judge(const Rows* p, const Rows* q, int64_t num_rows, int64_t width, const int64_t* drafted,
           const int64_t* num_drafted, const int64_t* rules, const float* coins, const uint64_t* token_keys,
           const uint64_t* next_keys, const int32_t* spread, int64_t* verdicts, int64_t num_threads) {
    const int64_t num_positions = p->num_positions;
#pragma omp parallel for schedule(dynamic) num_threads(int(num_threads))
    for (int64_t i = 0; i < num_rows * num_positions; ++i)
        if (i % num_positions <= num_drafted[i / num_positions])
            Distribution(*p, i / num_positions, i % num_positions).truncate(*p, i / num_positions);
#pragma omp parallel for schedule(dynamic) num_threads(int(std::min(num_threads, num_rows)))
    for (int64_t row = 0; row < num_rows; ++row) {
        const Verdict verdict =
            judged(*p, q, row, Rule(rules[row]), drafted + row * width, num_drafted[row], coins + row * width,
                   token_keys + row * (width + 1), next_keys[row], spread);
        verdicts[2 * row] = verdict.num_accepted;
        verdicts[2 * row + 1] = verdict.next_token;
    }
}
}
