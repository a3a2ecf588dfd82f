// Runs the CUDA kernels on the emulator and compares with a plain reference, in one order of blocks
// and threads.
//
//     cases topk|step|changed|brief|graph|infinity|packets|compact|compact_bits|compact_brief
//           |compact_graph|dense|quantize|groups [forward|reverse|random
//           [seed [blocks]]]
//
// where `blocks` are those that make progress together.
//
// Prints "right", or the failure, and exits with status 1 (wrong numbers) or 3 (an error of the
// emulator). Built plain and under sanitizers, and once for every planted mistake.
#include "cases.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <string_view>
#include <utility>

namespace {

constexpr std::pair<std::string_view, void (*)(std::mt19937&)> kCases[] = {
    {"topk", cases::run_topk},
    {"step", cases::run_step},
    {"changed", cases::run_changed},
    {"brief", cases::run_brief},
    {"graph", cases::run_graph},
    {"infinity", cases::run_infinity},
    {"packets", cases::run_packets},
    {"dense", cases::run_dense},
    {"quantize", cases::run_quantize},
    {"groups", cases::run_groups},
    {"compact", cases::run_compact},
    {"compact_bits", cases::run_compact_bits},
    {"compact_batch", cases::run_compact_batch},
    {"compact_brief", cases::run_compact_brief},
    {"compact_graph", cases::run_compact_graph},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string name = argv[1], order = argc > 2 ? argv[2] : "forward";
  const auto* const found = std::find_if(std::begin(kCases), std::end(kCases),
                                         [&](const auto& one) { return one.first == name; });
  if (found == std::end(kCases)) return 2;
  auto& options = emulator::options();
  options.order = order == "reverse"  ? emulator::Order::reverse
                  : order == "random" ? emulator::Order::random
                                      : emulator::Order::forward;
  if (argc > 3) options.seed = std::strtoull(argv[3], nullptr, 10);
  if (argc > 4) options.resident_blocks = static_cast<unsigned>(std::atoi(argv[4]));
  std::mt19937 random(static_cast<unsigned>(options.seed));
  try {
    found->second(random);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 3;
  }
  std::printf("right\n");
  return 0;
}
