// One table per instruction set: dtype x op -> loops.
#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "kernels/cpu/loops.h"

namespace pycomm::cpu {
namespace {

constexpr size_t kOps = kReduceOps.size();
using Table = std::array<Reducer, kDtypes.size() * kOps>;

template <Isa kIsa, size_t kEntry>
constexpr Reducer entry() {
  constexpr auto kDtype = static_cast<Dtype>(kEntry / kOps);
  constexpr auto kOp = static_cast<ReduceOp>(kEntry % kOps);
  using To = void*;
  using From = const void*;
  if constexpr (kHasMeaning<kDtype, kOp>)
    return {On<kIsa>::template run<Reduce<kDtype, kOp>, To, From, From, size_t>,
            On<kIsa>::template run<Finish<kDtype, kOp>, To, From, From, size_t, int>,
            On<kIsa>::template run<Fold<kDtype, kOp>, To, From, size_t, int>,
            On<kIsa>::template run<Join<kDtype, kOp>, To, const From*, size_t, int>};
  else
    return {};
}

template <Isa kIsa>
constexpr Table make_table() {
  return []<size_t... kEntries>(std::index_sequence<kEntries...>) {
    return Table{entry<kIsa, kEntries>()...};
  }(std::make_index_sequence<std::tuple_size_v<Table>>{});
}

#ifdef __x86_64__
constexpr std::array kTables{make_table<Isa::baseline>(), make_table<Isa::avx2>()};
#else
constexpr std::array<Table, 1> kTables{make_table<Isa::baseline>()};
#endif

}  // namespace

const Reducer& reducer_for(Isa isa, Dtype dtype, ReduceOp op) {
  return kTables[std::min(static_cast<size_t>(isa), kTables.size() - 1)]
                [static_cast<size_t>(dtype) * kOps + static_cast<size_t>(op)];
}

}  // namespace pycomm::cpu
