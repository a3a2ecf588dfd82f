// The instruction set of the CPU loops, and its name.
#include "cpu/isa.h"

#include <algorithm>
#include <string>

#include "core/errors.h"

namespace pycomm::cpu {

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> chosen{
      *std::find_if(kIsas.rbegin(), kIsas.rend(), [](Isa isa) { return runs_here(isa); })};
  return chosen;
}

void set_kernel_isa(std::string_view name) {
  const auto* const found = std::find(kIsaNames.begin(), kIsaNames.end(), name);
  if (found == kIsaNames.end())
    throw InvalidArgument("unknown instruction set '" + std::string(name) +
                          "'; one of: baseline, avx2, avx512, avx512_bf16, avx512_fp16");
  const Isa isa = kIsas[static_cast<size_t>(found - kIsaNames.begin())];
  if (!runs_here(isa)) throw Unsupported("this processor lacks " + std::string(name));
  chosen_isa().store(isa, std::memory_order_relaxed);
}

std::string_view kernel_isa() { return kIsaNames[static_cast<size_t>(isa_here())]; }

}  // namespace pycomm::cpu
