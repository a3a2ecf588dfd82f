#include "harness.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

namespace {

struct Named {
  std::string name;
  std::function<void()> body;
};

std::vector<Named>& tests() {
  static std::vector<Named> all;
  return all;
}

}  // namespace

Test::Test(std::string name, std::function<void()> body) {
  const auto has = [&](const std::string& part) { return name.find(part) != std::string::npos; };
  if (only.empty() || std::ranges::any_of(only, has))
    tests().push_back({std::move(name), std::move(body)});
}

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const auto& test : tests()) {
    if (test.name.find(filter) == std::string::npos) continue;
    if (filter.empty() && test.name.starts_with("long: ")) continue;
    try {
      test.body();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
