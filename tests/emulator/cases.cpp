// Runs CUDA's kernels on the emulator against a plain reference, in one order of blocks and
// threads.
//
//     cases topk|step|brief|infinity|packets|dense [forward|reverse|random [seed [resident
//     blocks]]]
//
// Prints "right", or what is wrong and ends with status 1 (wrong numbers) or 3 (what the emulator
// found). Built plain and under sanitizers, and once for every planted mistake: tests/test_cuda.py.
#include "cases.hpp"

#include <exception>

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string name = argv[1], order = argc > 2 ? argv[2] : "forward";
  auto& options = emulator::options();
  options.order = order == "reverse"  ? emulator::Order::reverse
                  : order == "random" ? emulator::Order::random
                                      : emulator::Order::forward;
  if (argc > 3) options.seed = std::strtoull(argv[3], nullptr, 10);
  if (argc > 4) options.resident_blocks = static_cast<unsigned>(std::atoi(argv[4]));
  std::mt19937 random(static_cast<unsigned>(options.seed));
  try {
    if (name == "topk") cases::run_topk(random);
    if (name == "step") cases::run_step(random);
    if (name == "brief") cases::run_brief(random);
    if (name == "infinity") cases::run_infinity(random);
    if (name == "packets") cases::run_packets(random);
    if (name == "dense") cases::run_dense(random);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 3;
  }
  std::printf("right\n");
  return 0;
}
