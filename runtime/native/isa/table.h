// The table of this instruction set's kernels.
#pragma once

#include "attend_rounded.h"
#include "attention.h"
#include "bands.h"
#include "elementwise.h"
#include "gemm.h"
#include "matbatch.h"
#include "matvec.h"
#include "prepare.h"

namespace headrace::HEADRACE_ISA {

static constexpr Kernels kTable = {
    .name = kName,
    .rounds_attention = kPairsFaster,
    .rounded_rows = kRoundedRows,
    .panel = kPanel,
    .rms_norm = rms_norm,
    .prepared_size = prepared_size,
    .prepare = prepare,
    .multiply = multiply,
    .matvec = matvec,
    .matbatch = matbatch,
    .unpack_panel = unpack_panel,
    .gemm = gemm,
    .gated = gated,
    .attend_chunk = attend_chunk,
    .softmax_row = softmax_row,
    .round_queries = round_queries,
    .round_entries = round_entries,
    .attend_rounded = attend_rounded,
    .merge = merge,
    .settle = settle,
    .to_float = to_float,
    .from_float = from_float,
    .rescale = rescale,
};

}  // namespace headrace::HEADRACE_ISA
