#include "bootstrap/rank_info.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <fstream>
#include <sstream>

#include "core/errors.h"
#include "core/sha256.h"
#include "os/fd.h"
#include "os/process.h"
#include "os/random.h"

namespace pycomm::bootstrap {
namespace {

constexpr size_t kMaxInfoBytes = 4096;
// In a host_id, precedes the name of a simulated host.
constexpr char kSimulatedHost = '/';

std::string read_boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

// Boot id and network namespace: two containers on one machine are two hosts unless they share
// both.
std::string host_identity() {
  static const std::string boot = read_boot_id();
  struct stat space{};
  if (::stat("/proc/self/ns/net", &space) != 0 || boot.empty())
    return "unknown-" + os::random_name();
  return boot + "-" + std::to_string(space.st_ino);
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

// Of this process. The kernel needs longer for it than for all else in a rank info.
int64_t own_start_time() {
  static std::atomic<int64_t> pid{0}, started{0};  // a forked child has another pid
  const auto own = static_cast<int64_t>(::getpid());
  if (pid.load() != own) {
    started = os::start_time(own);
    pid = own;
  }
  return started;
}

std::string with_length(const std::string& text) {
  return std::to_string(text.size()) + ":" + text;
}

// For example "tcp 16384 1048576 shm 8192 1048576".
std::string encode(const std::vector<TunedThresholds>& tuned) {
  std::string text;
  for (const auto& [transport, at] : tuned)
    text += (text.empty() ? "" : " ") + transport + " " + std::to_string(at.small_bytes) + " " +
            std::to_string(at.middle_bytes);
  return text;
}

// A number as std::to_string() writes it.
uint64_t number_in(const std::string& text) {
  uint64_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  check(parsed.ec == std::errc{} && std::to_string(number) == text,
        "invalid integer in a rank info");
  return number;
}

std::vector<TunedThresholds> decode_tuned(const std::string& text) {
  std::vector<TunedThresholds> tuned;
  std::istringstream words(text);
  for (TunedThresholds one; words >> one.transport;) {
    check(static_cast<bool>(words >> one.thresholds.small_bytes >> one.thresholds.middle_bytes),
          "invalid thresholds in a rank info");
    check(std::ranges::find(tuned, one.transport, &TunedThresholds::transport) == tuned.end(),
          "a rank info repeats a transport in its thresholds");
    tuned.push_back(one);
  }
  return tuned;
}

}  // namespace

RankInfo own_rank_info(const std::string& host) {
  // A forked child inherits the name; the pid distinguishes it.
  static const std::string name = os::random_name();
  RankInfo info;
  info.pid = ::getpid();
  info.started = own_start_time();
  info.process = name + "-" + std::to_string(info.pid);
  info.host_id = host_identity() + (host.empty() ? "" : kSimulatedHost + host);
  info.host = host.empty() ? host_name() : host;
  const os::DescriptorLimit descriptors = os::descriptor_limit();
  info.most_descriptors = std::to_string(descriptors.most);
  info.descriptors = std::to_string(descriptors.left);
  struct stat pids{};
  info.pid_space =
      ::stat("/proc/self/ns/pid", &pids) == 0 ? std::to_string(pids.st_ino) : info.process;
  return info;
}

bool on_one_machine(const RankInfo& a, const RankInfo& b) {
  const auto machine = [](const RankInfo& info) {
    return info.host_id.substr(0, info.host_id.find(kSimulatedHost));
  };
  return machine(a) == machine(b);
}

std::string encode(const RankInfo& info) {
  std::string text = "pycomm-7\n";
  for (const std::string& field :
       {info.process, info.host_id, info.host, std::to_string(info.pid),
        std::to_string(info.started), info.pid_space, info.options, info.token, info.shm, info.tcp,
        info.memory, info.heap, info.most_descriptors, info.descriptors, encode(info.tuned)})
    text += field + "\n";
  return text;
}

std::string context_of(const RankInfo& first, const std::string& name) {
  return with_length(first.token) + with_length(name);
}

std::string digest_of(const std::vector<RankInfo>& infos) {
  std::string all;
  for (const RankInfo& info : infos) all += with_length(encode(info));
  const Digest digest = sha256(all);
  return {digest.begin(), digest.end()};
}

RankInfo decode_rank_info(const std::string& text) {
  check(text.size() <= kMaxInfoBytes, "a rank info is too long");
  std::array<std::string, 16> fields;
  size_t begin = 0;
  for (std::string& field : fields) {
    const size_t end = text.find('\n', begin);
    check(end != std::string::npos, "a rank info is truncated");
    field = text.substr(begin, end - begin);
    begin = end + 1;
  }
  check(begin == text.size() && fields[0] == "pycomm-7",
        "a rank info is from another version of pycomm");
  RankInfo info{fields[1],  fields[2],  fields[3],  0,          0,
                fields[6],  fields[7],  fields[8],  fields[9],  fields[10],
                fields[11], fields[12], fields[13], fields[14], decode_tuned(fields[15])};
  info.pid = static_cast<int64_t>(number_in(fields[4]));
  info.started = static_cast<int64_t>(number_in(fields[5]));
  check(info.pid > 0, "a rank info has no process id");
  for (const std::string& number :
       {info.memory, info.heap, info.most_descriptors, info.descriptors})
    (void)number_in(number);
  // Some fields, such as thresholds, have several spellings.
  check(encode(info) == text, "a rank info is not in canonical form");
  return info;
}

}  // namespace pycomm::bootstrap
