// The headers of the standard library that most files include, compiled once for each set of
// options of the compiler. Parsing them takes half the time of a compilation without optimization.
//
// clang-tidy reads each file without it, so that a file that lacks an include fails in `make lint`.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>
