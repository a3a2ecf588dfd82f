// Ranks as threads of the test: start them, join them, and keep the outcome of each. And their
// arrays: filled by a formula, with guard bytes around them.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <latch>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "group/connect.h"
#include "group/group.h"
#include "harness.h"
#include "os/shared_memory.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "transport/local.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace ranks {

using namespace pycomm;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 10;  // of what a sanitizer makes slow
#else
inline constexpr int kSlowdown = 1;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kRaces = true;  // the thread sanitizer looks for them
#else
inline constexpr bool kRaces = false;
#endif

inline const std::vector<std::string> kTransports{"local", "shm", "tcp"};
// Of ranks that share memory. By shm threads of one process have two mappings of each segment but
// one of the heap: the thread sanitizer sees that two ranks work on an array, and not the flags
// that order them.
inline const std::vector<std::string> kShared(kTransports.begin(),
                                              kTransports.begin() + (kRaces ? 1 : 2));

// A test for each transport.
struct ByTransport {
  ByTransport(const std::string& name, void (*body)(const std::string& transport)) {
    for (const std::string& transport : kTransports)
      Test(transport + ": " + name, [=] { body(transport); });
  }
};

// Runs `body(rank)` on a thread for each rank; the first error of the lowest rank is thrown when
// all are done.
inline void run(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    try {
      if (errors[rank]) std::rethrow_exception(errors[rank]);
    } catch (const std::exception& error) {
      throw Failure("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " +
                    error.what());
    }
  }
}

// Descriptors that are open in this process now.
inline long descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all)) - 1;  // without the one that reads
}

// The default of every world; a suite that runs another's tests on demand sets it to 0.
inline int full_mesh = group::ConnectOptions{}.full_mesh;

// The rendezvous of the groups of one test.
struct World {
  int size = 1;
  std::string transport;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // far beyond any call that works
  std::chrono::nanoseconds heartbeat{0};  // none, as frames are counted; heartbeat tests set it
  std::string name = "world";
  bool thread_multiple = false;
  std::function<bool()> interrupted{};
  bool apart = false;  // rank 2 is on a host "host2", and so on
  rendezvous::LocalStore store{};

  std::shared_ptr<group::Group> join(int rank, bool reproducible = false) {
    group::ConnectOptions options;
    options.rank = rank;
    options.size = size;
    options.name = name;
    options.timeout = timeout;
    options.heartbeat = heartbeat;
    options.transport = transport;
    options.address = "127.0.0.1";
    if (apart) options.host = "host" + std::to_string(rank);
    options.full_mesh = full_mesh;
    options.reproducible = reproducible;
    options.thread_multiple = thread_multiple;
    options.interrupted = interrupted;
    return group::connect(store, options);
  }
};

// A world in which every rank runs `body` in its group, from when all have joined: a group that
// breaks while some still join is another test.
inline void run_groups(World& world, const std::function<void(group::Group&)>& body) {
  std::latch joined(world.size);
  run(world.size, [&](int rank) {
    std::shared_ptr<group::Group> group;
    {
      const struct Arrive {
        std::latch& joined;
        ~Arrive() { joined.count_down(); }  // also for a rank that fails to join
      } arrive{joined};
      group = world.join(rank);
    }
    joined.wait();
    body(*group);
  });
}

inline void run_groups(int size, const std::string& transport,
                       const std::function<void(group::Group&)>& body) {
  World world{.size = size, .transport = transport};
  run_groups(world, body);
}

// A test of `size` ranks for each transport.
struct ByGroups {
  ByGroups(const std::string& name, int size, void (*body)(group::Group&)) {
    for (const std::string& transport : kTransports)
      Test(transport + ": " + name, [=] { run_groups(size, transport, body); });
  }
};

// How a call ended: its error, or none, and how long it took.
struct Ending {
  std::optional<Error> error;
  double seconds = 0;

  bool is(ErrorKind kind) const { return error && error->kind() == kind; }
  std::string text() const {
    if (!error) return "no error";
    return std::string(kErrorNames[static_cast<size_t>(error->kind())]) + ": " + error->what();
  }
  bool says(const std::string& part) const { return text().find(part) != std::string::npos; }
  // Fails unless it is an error of this kind with all parts, and of this peer, if given.
  void check(ErrorKind kind, std::initializer_list<std::string> parts = {},
             std::optional<int> peer = {},
             std::source_location at = std::source_location::current()) const {
    expect(is(kind) && std::ranges::all_of(parts, [&](const auto& part) { return says(part); }),
           text(), at);
    if (peer) expect_equal(error->fields().peer, *peer, "the peer of: " + text(), at);
  }
};

inline Ending ending_of(const std::function<void()>& call) {
  const auto begin = Clock::now();
  Ending ending;
  try {
    call();
  } catch (const Error& error) {
    ending.error = error;
  }
  ending.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return ending;
}

// Both ends of a fresh connection, without a handshake.
struct Ends {
  std::unique_ptr<transport::Channel> a, b;
};

// Whether `in` was accepted from `out`, of this process.
inline bool is_mine(int in, int out) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  sockaddr_in caller{}, own{};
  socklen_t theirs = sizeof caller, ours = sizeof own;
  if (::getpeername(in, reinterpret_cast<sockaddr*>(&caller), &theirs) != 0) return false;
  if (caller.sin_family == AF_UNIX)
    return ::getsockopt(in, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
           credentials.pid == ::getpid();
  return ::getsockname(out, reinterpret_cast<sockaddr*>(&own), &ours) == 0 &&
         caller.sin_port == own.sin_port;
}

// A connection between two transports of this process, without a handshake.
struct Sockets {
  os::Fd out, in;
};

inline Sockets connect_sockets(const transport::SocketTransport& caller,
                               const transport::SocketTransport& listener) {
  using namespace std::chrono_literals;
  os::Fd out = caller.start_connect(listener.address());
  const int door = listener.listeners().at(0);
  expect((os::poll_one(door, POLLIN, 10s) & POLLIN) != 0, "no connection arrived");
  os::Fd in = os::accept_from(door);
  while (in && !is_mine(in.get(), out.get())) {  // support/attack.py connects to all
    expect((os::poll_one(door, POLLIN, 10s) & POLLIN) != 0, "only other clients connected");
    in = os::accept_from(door);
  }
  expect(in && (os::poll_one(out.get(), POLLOUT, 10s) & POLLOUT) != 0, "no connection");
  return {std::move(out), std::move(in)};
}

inline Ends channel_pair(const std::string& transport, size_t ring_bytes) {
  using namespace std::chrono_literals;
  if (transport == "local") {
    static std::atomic<int> meetings{0};
    const std::string meeting = "test " + std::to_string(meetings++);
    auto a = transport::local_channel(meeting, 0, 1, ring_bytes);
    return {std::move(a), transport::local_channel(meeting, 1, 0, ring_bytes)};
  }
  std::string why;
  const auto make = [&] {
    return transport == "shm" ? transport::make_shm(ring_bytes, os::page_bytes(), why)
                              : transport::make_tcp("127.0.0.1", "");
  };
  const auto caller = make(), listener = make();
  expect(caller && listener, why);
  auto [out, in] = connect_sockets(*caller, *listener);
  caller->send_memory(out.get());
  listener->send_memory(in.get());
  const Deadline deadline(10s);
  auto a = caller->accept(std::move(out), deadline);
  return {std::move(a), listener->accept(std::move(in), deadline)};
}

// Numbers that every dtype holds exactly are written and read as int.
inline void put(Dtype dtype, std::byte* at, int value) {
  const auto write = [&](auto number) { std::memcpy(at, &number, sizeof number); };
  if (dtype == Dtype::float32) return write(static_cast<float>(value));
  if (dtype == Dtype::float64) return write(static_cast<double>(value));
  if (dtype == Dtype::bfloat16)
    return write(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16));
  std::memset(at, 0, bytes_of(dtype));
  *at = static_cast<std::byte>(value);  // the integers, below 128
}

// Element `i` of rank `rank`'s input to call `call`: small, so that sums are exact. Element
// i + kPeriod is the same.
inline constexpr size_t kPeriod = 7;
inline int element(int rank, size_t i, int call = 0) {
  return static_cast<int>((i * 3 + static_cast<size_t>(rank) * 5 + static_cast<size_t>(call)) %
                          kPeriod);
}

inline constexpr size_t kGuard = 64;
inline constexpr std::byte kGuardByte{0xa5}, kFill{0x5a};

// `count` elements, filled with kFill, and kGuard bytes on both sides that must not change.
class Array {
 public:
  Array(Dtype dtype, size_t count)
      : dtype_(dtype), count_(count), bytes_(count * bytes_of(dtype) + 2 * kGuard, kFill) {
    for (size_t i = 0; i < kGuard; ++i) bytes_[i] = bytes_[bytes_.size() - 1 - i] = kGuardByte;
  }
  std::byte* data() { return bytes_.data() + kGuard; }
  Dtype dtype() const { return dtype_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * bytes_of(dtype_); }
  std::byte* at(size_t i) { return data() + i * bytes_of(dtype_); }
  // Makes all elements, or `count` from `first` on, value(0), value(1), ...; it has the period of
  // element(). A copy is one access for a sanitizer; single elements took most of a suite's time.
  template <typename Value>
  void fill(Value&& value) {
    fill(0, count_, value);
  }
  template <typename Value>
  void fill(size_t first, size_t count, Value&& value) {
    for (size_t i = 0; i < std::min(count, kPeriod); ++i) put(dtype_, at(first + i), value(i));
    size_t done = kPeriod;
    while (done < count) {
      const size_t more = std::min(done, count - done);
      std::memcpy(at(first + done), at(first), more * bytes_of(dtype_));
      done += more;
    }
  }
  bool operator==(const Array& other) const {
    return bytes_.size() == other.bytes_.size() &&
           std::memcmp(bytes_.data(), other.bytes_.data(), bytes_.size()) == 0;
  }

 private:
  Dtype dtype_;
  size_t count_;
  std::vector<std::byte> bytes_;
};

// An all_reduce in place.
inline group::Call sum_in_place(Array& array, Algorithm algorithm = Algorithm::automatic) {
  return {.operation = Operation::all_reduce,
          .dtype = array.dtype(),
          .input = array.data(),
          .output = array.data(),
          .count = array.count(),
          .algorithm = algorithm};
}

inline group::Call sum_in_place(std::span<float> x, Algorithm algorithm = Algorithm::automatic) {
  return {.operation = Operation::all_reduce,
          .dtype = Dtype::float32,
          .input = x.data(),
          .output = x.data(),
          .count = x.size(),
          .algorithm = algorithm};
}

// A send or recv of the array.
inline group::Call message(Operation operation, Array& array, int peer, uint32_t tag = 0) {
  return {.operation = operation,
          .dtype = array.dtype(),
          .input = array.data(),
          .output = array.data(),
          .count = array.count(),
          .peer = peer,
          .tag = tag};
}

}  // namespace ranks
