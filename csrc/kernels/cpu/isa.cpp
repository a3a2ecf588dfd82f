// The instruction set of the loops of this folder, and its name.
#include "kernels/cpu/isa.h"

#include <algorithm>
#include <string>

#include "core/errors.h"
#include "kernels/device_kernels.h"

namespace pycomm {
namespace cpu {

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> chosen{
      *std::find_if(kIsas.rbegin(), kIsas.rend(), [](Isa isa) { return runs_here(isa); })};
  return chosen;
}

}  // namespace cpu

void set_kernel_isa(std::string_view name) {
  const auto* const found = std::find(cpu::kIsaNames.begin(), cpu::kIsaNames.end(), name);
  if (found == cpu::kIsaNames.end())
    throw InvalidArgument(std::string(name) + ": not one of baseline, avx2, avx512");
  const cpu::Isa isa = cpu::kIsas[static_cast<size_t>(found - cpu::kIsaNames.begin())];
  if (!cpu::runs_here(isa)) throw Unsupported("this processor lacks " + std::string(name));
  cpu::chosen_isa().store(isa, std::memory_order_relaxed);
}

std::string_view kernel_isa() { return cpu::kIsaNames[static_cast<size_t>(cpu::isa_here())]; }

}  // namespace pycomm
