// The headers of the standard library that most files include, compiled once for each variant of
// build.py. Parsing them takes half the time of a compilation without optimization.
//
// The modules of users are built without it, so a file that lacks an include still fails.
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
