// The table of this instruction set's kernels, which core/dispatch.cpp chooses from. A new kernel is a field of Kernels (core/kernels.h)
// and a row here, in the same order. Guard: runtime/native/tests/driver.cpp, on every set that the processor has.
#include "attend_rounded.h"
#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "low_rank.h"
#include "parts.h"
#include "prepare.h"
#include "recurrent.h"
#include "sample.h"

namespace headrace::HEADRACE_ISA {

static constexpr Kernels kTable = {
    .name = kName,
    .rounds_attention = kPairsFaster,
    .rounded_rows = kRoundedRows,
    .panel = kPanel,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .prepared_size = prepared_size,
    .prepare = prepare,
    .multiply = multiply,
    .multiply_tiles = nullptr,
    .multiply_floats = multiply_floats,
    .add_factor = add_factor,
    .unpack_panel = unpack_panel,
    .gemm = gemm,
    .gated = gated,
    .xielu = xielu,
    .attend_chunk = attend_chunk,
    .attend_packed = attend_packed,
    .hadamard = hadamard,
    .pack_key = pack_key,
    .pack_value = pack_value,
    .unpack_keys = unpack_keys,
    .unpack_values = unpack_values,
    .join_states = join_states,
    .softmax_row = softmax_row,
    .round_queries = round_queries,
    .round_entries = round_entries,
    .attend_rounded = attend_rounded,
    .merge = merge,
    .settle = settle,
    .divided = divided,
    .exponentials = exponentials,
    .share_above = share_above,
    .to_float = to_float,
    .from_float = from_float,
    .recur = recur,
    .scan = scan,
    .wkv = wkv,
    .convolve = convolve,
    .decays = decays,
    .interpolate = interpolate,
    .multiply_pairs = multiply_pairs,
    .rescale = rescale,
};

const Kernels& kernels() { return kTable; }

#if defined(HEADRACE_AVX512)
static constexpr Kernels with_tiles(const char* name, decltype(Kernels::multiply_tiles) multiply) {
  Kernels table = kTable;
  table.name = name;
  table.multiply_tiles = multiply;
  return table;
}

static constexpr Kernels kAmx = with_tiles("amx", multiply_amx), kEmulated = with_tiles("amx-emulated", multiply_emulated);

const Kernels& amx_kernels() { return kAmx; }
const Kernels& emulated_kernels() { return kEmulated; }
#endif

}  // namespace headrace::HEADRACE_ISA
