// The kernels of one instruction set.
//
// Contract: plain pointers and sizes, no allocation, no threads, no exceptions, no MLX. Every function may be
// called from any thread. Activations are float32. K = input features, N = output features (rows of a weight).
//
// isa/table.cpp fills in a Kernels for each instruction set, dispatch.cpp chooses one, and the other files of core/ call it.
// Guard: runtime/native/tests/driver.cpp runs the C++ tests on every set; tests/runtime/ops/test_native_kernels.py.
#pragma once

#include <cstdint>

namespace headrace {

// Number types. The last two are 8-bit scales: E8M0 and E4M3 of the OCP microscaling formats.
enum class Type : std::uint8_t { f32, f16, bf16, e8m0, e4m3 };
// Codes of quantized values: integers with scale and offset, or floats of 4 (E2M1) or 8 bits (E4M3) with a scale.
enum class Code : std::uint8_t { affine, fp4, fp8 };
// Activations. The last two, max(x, 0)^2 and xIELU, gate nothing; the others gate a second projection.
enum class Act : std::uint8_t { none, silu, gelu, clamped, sigmoid, squared, xielu };

[[gnu::always_inline]] inline bool gates(Act act) { return act != Act::none && act < Act::squared; }

// Numbers of xIELU (arXiv:2411.13010): positive x^2 + beta x for x > 0, else negative (e^min(x, eps) - 1 - x) + beta x.
struct Curve {
  float positive = 0, negative = 0, beta = 0, eps = 0;
};

[[gnu::always_inline]] inline int64_t size_of(Type type) {
  return type == Type::f32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1;
}

struct LowRank;

constexpr int kHalves = 32;  // a Matrix::rounding: activations as two bfloat16 numbers each (isa/halves.h)

// N rows of K weights, row-contiguous or, if rounds(), interleaved, those of 5 and 6 bits in planes (core/interleaved.h). Quantized rows
// have MLX's affine layout: value i is at bit i * bits of the packed row, w = scale[i / group] * q + offset[i / group]. Without offsets
// integers are symmetric, with 0 at 2^(bits - 1): w = scale[i / group] * (q - 2^(bits - 1)), only if may_be_symmetric(); other codes have
// no offsets.
struct Matrix {
  const void* data = nullptr;
  const void* scales = nullptr;   // (N, K / group), nullptr for plain weights
  const void* offsets = nullptr;  // (N, K / group) or nullptr, affine only
  const float* bias = nullptr;    // (N), added to the product, or nullptr
  const LowRank* low_rank = nullptr;  // added to the product by run_linear alone, or nullptr
  int64_t n = 0;
  int64_t k = 0;
  int bits = 0;   // 0 for plain weights
  int group = 0;  // weights of a row that share a scale
  Code code = Code::affine;
  bool exact = false;  // never round activations
  int rounding = 16;   // bits of rounded activations, 16 or 8, or kHalves
  Type type = Type::f32;  // of scales and offsets, or of plain data

  // Always inlined: compiled for several instruction sets, see isa/simd.h.
  [[gnu::always_inline]] bool quantized() const { return bits != 0; }
  // Whether products are in integers: rounded activations (isa/rounded.h) and interleaved weights.
  [[gnu::always_inline]] bool rounds() const {
    return !exact && code != Code::fp8 && (bits == 2 || bits == 4 || bits == 5 || bits == 6 || bits == 8);
  }
  // Whether weights are in planes of bits (core/interleaved.h).
  [[gnu::always_inline]] bool planed() const { return rounds() && (bits == 5 || bits == 6); }
  // Whether its rows may meet activations in 8 bits or halves, too.
  [[gnu::always_inline]] bool rounds_otherwise() const { return rounds() && !planed(); }
  // Whether Kernels::multiply_tiles takes it.
  [[gnu::always_inline]] bool fits_tiles() const { return rounds_otherwise() && k % 32 == 0; }
  [[gnu::always_inline]] bool may_be_symmetric() const {
    return rounds() && code == Code::affine && bits != 2 && (type != Type::f32 || bits == 6);
  }
  [[gnu::always_inline]] bool symmetric() const { return quantized() && code == Code::affine && offsets == nullptr; }
  [[gnu::always_inline]] int64_t groups() const { return quantized() ? k / group : 0; }
  [[gnu::always_inline]] int64_t row_bytes() const { return quantized() ? k * bits / 8 : k * size_of(type); }
};

// B of a low-rank product, plain numbers (rows, rank), interleaved (core/interleaved.h): B t is added to the products of
// rows [row, row + rows) of a matrix, with numbers [first, first + rank) of t.
struct Factor {
  const void* data = nullptr;
  Type type = Type::f32;
  int64_t row = 0, rows = 0;
  int64_t first = 0, rank = 0;
};

// Low-rank products of an adapter. t is A x times `scales`, and R the rank of all factors together.
struct LowRank {
  Matrix a;                       // (R, K), plain
  const float* scales = nullptr;  // (R)
  const Factor* factors = nullptr;
  int64_t count = 0;  // of factors
};

// Rows of weights that a thread reads next, from `row` on, to prefetch; w is nullptr, or a matrix that rounds().
struct Upcoming {
  const Matrix* w = nullptr;
  int64_t row = 0;
};

// Packing of keys or of values (core/packed.h); bits is 0 for plain ones.
struct Packing {
  int bits = 0;
  int group = 0;  // numbers per scale; the last group of a head may have fewer

  [[gnu::always_inline]] int64_t groups(int64_t dim) const { return (dim + group - 1) / group; }
};

struct Packings {
  Packing keys, values;
};

// Keys and values of one head: rows of `dim` numbers, contiguous.
struct HeadCache {
  const void* keys;
  const void* values;
  int64_t dim;
  Type type;
};

// Memory to prefetch: two places of `bytes` each.
struct Places {
  const char* first = nullptr;
  const char* second = nullptr;
  int64_t bytes = 0;
};

// Up to kAttendChunk contiguous entries of one head. Packed ones are `first` and the n - 1 behind it in their block.
struct Chunk {
  const char* keys;
  const char* values;
  int64_t n;
  int64_t first;
  Places own;      // its memory, unless it was prefetched
  Places next[2];  // to prefetch meanwhile
};

// Online softmax state of one query: `acc` is sum(exp(s - top) * v), not yet divided by `sum`.
struct Softmax {
  float top;
  float sum;
  float* acc;  // (dim)
};

// Scaling of raw scores q.k: s * scale, soft-capped if `softcap` > 0.
struct ScoreRule {
  float scale;
  float softcap;
};

// Queries for integer products, one lane each of L = Kernels::rounded_rows (isa/attend_rounded.h).
struct QueryRows {
  float* words;      // (D / 2, L) pairs of 16-bit integers
  float* scales;     // (L)
  float* positions;  // (L) whole numbers
  float* firsts;     // (L) the first positions that they see
  float* top;        // (L) of the scores so far, in powers of two
  float* sum;        // (L) of the weights so far
  float* acc;        // (D, L) sum of weight * value, not yet divided by `sum`
};

// The first `count` lanes of a QueryRows and the first `n` entries of a block that they meet, with `hides` from their first positions
// to their own.
struct Meeting {
  QueryRows rows;
  int64_t count, n;
  bool hides;
};

// kRoundedEntries keys and values of one head, rounded for QueryRows.
struct EntryBlock {
  float* keys;             // (entries, D / 2 padded to 16) pairs
  float* key_scales;       // (entries)
  float* values;           // (entries / 2, D) pairs
  float* value_exponents;  // (entries) exponent of the power of two that divided the values
  float* value_shares;     // (entries) 1 over that power
};

// One token of a head for a recurrence (core/mixer.h): q, k (D), v, y (rows), decay (1 or D), beta (1) or nullptr.
struct StateToken {
  const float* q;
  const float* k;
  const float* v;
  const float* decay;
  const float* beta;
  float* y;
};

// One token of channels of a selective scan (core/mixer.h): x, gate z, step before its softplus, y (channels), b, c (numbers of a state).
struct ScanToken {
  const float* x;
  const float* z;
  const float* step;
  const float* b;
  const float* c;
  float* y;
};

// One token of a head of RWKV-7 (core/mixer.h), D each: w and a before their sigmoids, g as it is.
struct WkvToken {
  const float* r;
  const float* w;
  const float* k;
  const float* v;
  const float* a;
  const float* g;
  float* y;
};

// Vectors of a head of RWKV-7, D each.
struct WkvHead {
  const float* removed_key;
  const float* key_rate;
  const float* bonus;
  const float* norm;
  const float* norm_bias;
};

// Count and weight of the numbers above a limit.
struct Share {
  float count;
  float mass;
};

constexpr float kLowest = -1e37f;     // below any score: the maximum of an empty state
constexpr int64_t kScorePad = 16;     // score rows are padded to a multiple of this
constexpr int64_t kMaxQueries = 12;   // queries of one attend_chunk call
constexpr int64_t kPackedQueries = 4;  // queries of one attend_packed call
constexpr int64_t kAttendChunk = 128;  // entries of a chunk
constexpr int64_t kBand = 32;         // interleaved rows of weights
constexpr int64_t kRoundedEntries = 64;  // cache entries in an EntryBlock
constexpr int64_t kMaxRoundedRows = 48;  // queries in a QueryRows, at most
constexpr int64_t kPanelDepth = 256;  // values of k in a GEMM panel

struct Kernels {
  const char* name;
  bool rounds_attention;  // whether integer attention is faster over half-precision K/V
  int64_t rounded_rows;   // queries of a QueryRows
  int panel;  // columns of a GEMM panel; always a multiple of 16

  // out = x * rsqrt(mean(x^2) + eps) * weight, over k values; x and out may be the same.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t k, float* out);

  // out = (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, over k values; bias may be nullptr, out is not x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t k, float* out);

  // Convert an activation row to the order of a matrix's kernels. prepared_size is a multiple of 16 floats.
  int64_t (*prepared_size)(const Matrix& w);
  void (*prepare)(const Matrix& w, const float* x, float* prepared);

  // y[m * ldy + r] for m < batch prepared rows (`stride` apart) and r < rows, for a matrix that rounds(). No bias. Fastest if `row`
  // and `rows` are multiples of kBand.
  void (*multiply)(const Matrix& w, const float* prepared, int64_t stride, int64_t batch, int64_t row, int64_t rows,
                   float* y, int64_t ldy, const Upcoming& next);

  // The same for rows in halves and a matrix that fits_tiles(); nullptr without tiles.
  void (*multiply_tiles)(const Matrix& w, const float* prepared, int64_t stride, int64_t batch, int64_t row, int64_t rows,
                         float* y, int64_t ldy);

  // The same for other matrices.
  void (*multiply_floats)(const Matrix& w, const float* prepared, int64_t stride, int64_t batch, int64_t row,
                          int64_t rows, float* y, int64_t ldy);

  // y[i] += the sum over j < b.rank of t[j] * B[row + i][j], for i < rows.
  void (*add_factor)(const Factor& b, const float* t, int64_t row, int64_t rows, float* y);

  // panel_out[k - k0][column + r] = w[row + r][k] for k in [k0, k0 + kc), of a matrix of plain numbers; kc <= kPanelDepth,
  // k0 a multiple of it. Columns are written in whole vectors, with zeros beyond `rows`.
  void (*unpack_panel)(const Matrix& w, int64_t row, int64_t rows, int64_t k0, int64_t kc, int64_t column,
                       float* panel_out);

  // c[m][0, panel) (+)= a[m][0, kc) . b[0, kc)[0, panel).
  void (*gemm)(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t m, int64_t kc,
               bool accumulate);

  // out = act(gate) * up over n values; act(gate) if `up` is nullptr, never with Act::clamped.
  void (*gated)(const float* gate, const float* up, int64_t n, Act act, float* out);

  // x = xIELU(x) over n values.
  void (*xielu)(const Curve& curve, int64_t n, float* x);

  // Attend `queries` <= kMaxQueries rows of q over a chunk that is not empty, into new states (queries) with given `acc`. `scores` is
  // scratch for (queries, kAttendChunk); dim is a multiple of 16.
  void (*attend_chunk)(const Chunk& chunk, Type type, int64_t dim, const float* const* q, int64_t queries, ScoreRule rule,
                       float* scores, Softmax* states);

  // The same in integers for packed entries and up to kPackedQueries. `scores` has packed_scratch(queries, dim) more floats.
  void (*attend_packed)(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, int64_t queries,
                        ScoreRule rule, float* scores, Softmax* states);

  // Multiply each part of x by the orthogonal, symmetric Hadamard matrix of its size: the largest power of two that divides dim, which is a
  // multiple of 16.
  void (*hadamard)(float* x, int64_t dim);

  // Pack one entry's row of a head (dim) into a block; unpack entries [begin, begin + n), `begin` a multiple of kTile, to (n rounded
  // up to kTile, dim).
  void (*pack_key)(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* keys);
  void (*pack_value)(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* values);
  void (*unpack_keys)(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out);
  void (*unpack_values)(const char* values, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out);

  // Merge the states of one query's chunks and divide by the sum.
  void (*join_states)(const Softmax* states, int64_t count, int64_t dim, float* out);

  // One row of a score tile: scores[0, n) become exp(soft-capped score - top) within [lo, hi) and 0 outside; n is a multiple of
  // kScorePad. Updates top and sum; returns the accumulator's factor.
  float (*softmax_row)(float* scores, int64_t n, int64_t lo, int64_t hi, ScoreRule rule, Softmax* state);

  // Integer attention over half-precision or unpacked K/V. Round `count` rows of q times `factor` and clear the sums; attend
  // to a block at position `first`; merge the state of other rows and clear it; write the weighted mean out[r] (D). Without softcap
  // `factor` includes log2(e).
  void (*round_queries)(const float* const* q, int64_t count, int64_t dim, float factor, const QueryRows& rows);
  void (*round_entries)(const HeadCache& kv, int64_t begin, int64_t n, const EntryBlock& block);
  void (*attend_rounded)(const EntryBlock& block, int64_t first, int64_t dim, ScoreRule rule, const Meeting* meetings, int64_t count);
  void (*merge)(const QueryRows& rows, const QueryRows& other, int64_t dim);
  void (*settle)(const QueryRows& rows, int64_t count, int64_t dim, float* const* out);

  // Passes over logits, n a multiple of kScorePad. out = x / divisor and its maximum, NaN if any is; out = e^(x - top), 0 for NaN,
  // and its sum; count and weight of x above a limit.
  float (*divided)(const float* x, int64_t n, float divisor, float* out);
  float (*exponentials)(const float* x, int64_t n, float top, float* out);
  Share (*share_above)(const float* x, const float* weights, int64_t n, float limit);

  // Conversions to and from stored K/V.
  void (*to_float)(const void* src, Type type, int64_t n, float* out);
  void (*from_float)(const float* src, int64_t n, Type type, void* out);

  // Update `rows` rows of a head's state (rows, dim) with a token, and write their y; dim is a multiple of 16. per_key: `decay` has one
  // factor for each of dim.
  void (*recur)(const StateToken& token, int64_t dim, int64_t rows, bool per_key, float* state);

  // Update the states (channels, numbers) of a selective scan with a token, and write y. rate: (channels, numbers); skip: (channels) of
  // x in y, or nullptr.
  void (*scan)(const ScanToken& token, const float* rate, const float* skip, int64_t channels, int64_t numbers, float* state);

  // Update the state (dim, dim) of a head of RWKV-7 with a token, and write y; dim is a multiple of 16. `scratch` has 4 dim floats.
  void (*wkv)(const WkvToken& token, const WkvHead& head, float eps, int64_t dim, float* state, float* scratch);

  // out[c] = act(bias[c] + the sum over j < width of x[j][c] * weight[j * ldw + c]) for c < n; bias may be nullptr, act none or silu.
  void (*convolve)(const float* const* x, const float* weight, int64_t ldw, const float* bias, int64_t n, int64_t width, Act act,
                   float* out);

  // out = exp(rate * softplus(x + bias)) over n values.
  void (*decays)(const float* x, const float* bias, float rate, int64_t n, float* out);

  // out = x + (before - x) * share over n values; out may be share.
  void (*interpolate)(const float* x, const float* before, const float* share, int64_t n, float* out);

  // out = a * b over n values; out may be b.
  void (*multiply_pairs)(const float* a, const float* b, int64_t n, float* out);

  // acc = acc * factor over n values.
  void (*rescale)(float* acc, float factor, int64_t n);
};

// True if any of the compiled kernels run on this processor. If not, there are no best_kernels().
bool have_kernels();

// The kernels in use: the fastest for this processor, or those of use_kernels.
const Kernels& best_kernels();

// Use the kernels "avx512", "avx2", "neon" or "portable", or "amx" or "amx-emulated": those of avx512, and tiles for prompts. False if they
// are not compiled, or this processor cannot run them.
bool use_kernels(const char* name);

}  // namespace headrace
