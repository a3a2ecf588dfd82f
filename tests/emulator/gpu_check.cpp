// Compares every CUDA kernel with the CPU's, bit for bit, and times them: on a GPU, or on the
// emulator, in one order of blocks and threads.
//
//     gpu_check --bits [CASE ...] [--small] [--seed N]      all cases without CASE
//     gpu_check --time [NAME ...] [--small]                 time_kernels.cpp
//
// On the emulator there is no --time, all is small, and these are known as well:
//     --order forward|reverse|random   of blocks and threads
//     --blocks N                       that make progress together
//
// Prints a line of JSON for each result, and a table. Exits with status 1 for wrong numbers, 2 for
// unknown arguments, 3 for an error of CUDA or the emulator.
#include <chrono>
#include <exception>
#include <string_view>

#include "cases.hpp"

namespace cases {
namespace {

struct Case {
  std::string_view name;
  void (*run)(std::mt19937&);
};

constexpr Case kCases[] = {
    {"topk", run_topk},
    {"step", run_step},
    {"step_dtypes", run_step_dtypes},
    {"brief", run_brief},
    {"graph", run_graph},
    {"infinity", run_infinity},
    {"packets", run_packets},
    {"packet_dtypes", run_packet_dtypes},
    {"dense", run_dense},
    {"quantize", run_quantize},
    {"groups", run_groups},
    {"compact", run_compact},
    {"compact_bits", run_compact_bits},
    {"compact_batch", run_compact_batch},
    {"compact_brief", run_compact_brief},
    {"compact_graph", run_compact_graph},
#ifndef ON_GPU
    {"changed", run_changed},
#endif
};

struct Arguments {
  bool bits = false, time = false, small = false;
  unsigned seed = 1;
  std::vector<std::string_view> names;
};
Arguments given;

int refuse(std::string_view argument) {
  std::fprintf(stderr, "gpu_check: invalid argument %.*s; see the head of gpu_check.cpp\n",
               static_cast<int>(argument.size()), argument.data());
  return 2;
}

#ifdef ON_GPU
bool set_emulator(std::string_view /*flag*/, std::string_view /*value*/) { return false; }
#else
bool set_emulator(std::string_view flag, std::string_view value) {
  auto& options = emulator::options();
  if (flag == "--blocks")
    return (options.resident_blocks = static_cast<unsigned>(std::atoi(value.data()))) > 0;
  if (flag != "--order") return false;
  options.order = value == "reverse"  ? emulator::Order::reverse
                  : value == "random" ? emulator::Order::random
                                      : emulator::Order::forward;
  return value == "forward" || options.order != emulator::Order::forward;
}
#endif

// Returns what cannot be parsed, or an empty text.
std::string_view parse(const std::vector<std::string_view>& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == "--bits") {
      given.bits = true;
    } else if (word == "--time") {
      given.time = true;
    } else if (word == "--small") {
      given.small = true;
    } else if (!word.starts_with("--")) {
      given.names.push_back(word);
    } else if (i + 1 < words.size() && word == "--seed") {
      given.seed = static_cast<unsigned>(std::atoi(words[++i].data()));
    } else if (i + 1 == words.size() || !set_emulator(word, words[++i])) {
      return word;
    }
  }
#ifndef ON_GPU
  if (given.time) return "--time";
  emulator::options().seed = given.seed;
#endif
  return given.bits == given.time ? "(expected --bits or --time)" : "";
}

int compare() {
  for (const std::string_view name : given.names)
    if (std::ranges::find(kCases, name, &Case::name) == std::end(kCases)) return refuse(name);
  std::string table;
  for (const Case& one : kCases) {
    if (!given.names.empty() && std::ranges::find(given.names, one.name) == given.names.end())
      continue;
    const std::string name(one.name);
    const auto start = std::chrono::steady_clock::now();
    std::mt19937 random(given.seed);
    one.run(random);
    finish();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("{\"case\": \"%s\", \"right\": true, \"seconds\": %.3f}\n", name.c_str(), seconds);
    std::fflush(stdout);
    char row[64];
    std::snprintf(row, sizeof row, "%-16s %8.2f s  right\n", name.c_str(), seconds);
    table += row;
  }
  std::printf("%s", table.c_str());
  return 0;
}

}  // namespace

bool large() {
#ifdef ON_GPU
  return !given.small;
#else
  return false;
#endif
}

std::vector<size_t> sizes(std::vector<size_t> small) {
  if (large())
    for (const size_t count : {size_t{2047}, size_t{4095}, size_t{4096}, size_t{65'535},
                               size_t{65'537}, size_t{1} << 20, size_t{5'000'011}})
      small.push_back(count);
  return small;
}

}  // namespace cases

int main(int argc, char** argv) {
  using namespace cases;  // NOLINT(google-build-using-namespace): a program
  const std::string_view wrong = parse({argv + 1, argv + argc});
  if (!wrong.empty()) return refuse(wrong);
  try {
#ifdef ON_GPU
    if (given.time) return time_kernels(given.names);
#endif
    return compare();
  } catch (const std::exception& error) {  // of CUDA: reported, with a status of its own
    std::printf("FAILED: %s\n", error.what());
    return 3;
  }
}
