// One table per instruction set: dtype x op -> loops.
#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "kernels/cpu/loops.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kOps = kReduceOps.size();
using Table = std::array<Reducer, kDtypes.size() * kOps>;

// The set whose loops are the fastest ones of `isa`. Wider vectors do not help float32, integers
// and others, whose loops are bound by memory.
constexpr cpu::Isa loops_of(cpu::Isa isa, Dtype dtype) {
  using cpu::Isa;
  if (dtype == Dtype::bfloat16) return std::min(isa, Isa::avx512_bf16);
  if (dtype == Dtype::float16) return isa == Isa::avx512_bf16 ? Isa::avx512 : isa;
  return std::min(isa, Isa::avx2);
}

template <cpu::Isa kBest, size_t kEntry>
constexpr Reducer entry() {
  constexpr auto kDtype = static_cast<Dtype>(kEntry / kOps);
  constexpr cpu::Isa kIsa = loops_of(kBest, kDtype);
  constexpr auto kOp = static_cast<ReduceOp>(kEntry % kOps);
  using To = void*;
  using From = const void*;
  if constexpr (cpu::kHasMeaning<kDtype, kOp>)
    return {cpu::On<kIsa>::template run<Reduce<kDtype, kOp>, To, From, From, size_t>,
            cpu::On<kIsa>::template run<Finish<kDtype, kOp>, To, From, From, size_t, int>,
            cpu::On<kIsa>::template run<Fold<kDtype, kOp>, To, From, size_t, int>,
            cpu::On<kIsa>::template run<Join<kDtype, kOp>, To, const From*, size_t, int>};
  else
    return {};
}

template <cpu::Isa kIsa>
constexpr Table make_table() {
  return []<size_t... kEntries>(std::index_sequence<kEntries...>) {
    return Table{entry<kIsa, kEntries>()...};
  }(std::make_index_sequence<std::tuple_size_v<Table>>{});
}

#ifdef __x86_64__
constexpr std::array kTables{make_table<cpu::Isa::baseline>(), make_table<cpu::Isa::avx2>(),
                             make_table<cpu::Isa::avx512>(), make_table<cpu::Isa::avx512_bf16>(),
                             make_table<cpu::Isa::avx512_fp16>()};
#else
constexpr std::array<Table, 1> kTables{make_table<cpu::Isa::baseline>()};
#endif

}  // namespace

const Reducer& reducer_for(cpu::Isa isa, Dtype dtype, ReduceOp op) {
  return kTables[static_cast<size_t>(isa)]
                [static_cast<size_t>(dtype) * kOps + static_cast<size_t>(op)];
}

}  // namespace pycomm::kernels
