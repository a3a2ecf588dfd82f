// What a rank publishes in the store while a group forms: its process, host and addresses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/choose.h"

namespace pycomm::bootstrap {

// Measured thresholds of algorithm choice for a transport.
struct TunedThresholds {
  std::string transport;
  collectives::Thresholds thresholds;
};

struct RankInfo {
  std::string process;  // equal for ranks that are threads of one process
  std::string host_id;  // equal for ranks of one host and network namespace
  std::string host;     // host name
  int64_t pid = 0;
  int64_t started = 0;    // as Member::started, if its process id is visible
  std::string pid_space;  // equal for ranks that share a pid namespace
  std::string options;
  std::string token;                     // rank 0's: unique to the group
  std::string shm, tcp;                  // addresses; empty: unavailable
  std::string memory;                    // bytes of its shared memory, in digits
  std::string heap;                      // bytes of its heap, in digits; "0": none
  std::string most_descriptors;          // that its process may have, in digits
  std::string descriptors;               // those that are not open
  std::vector<TunedThresholds> tuned{};  // rank 0's apply to all
};

// `host`: see ConnectOptions.
RankInfo own_rank_info(const std::string& host);
// Whether two ranks run on the same machine, even if their simulated hosts differ.
bool on_one_machine(const RankInfo& a, const RankInfo& b);
std::string encode(const RankInfo& info);
// Identifies a group's connections. Unique for each pair of arguments.
std::string context_of(const RankInfo& first, const std::string& name);
// A digest of all rank infos, by rank: shows whether two ranks read the same.
std::string digest_of(const std::vector<RankInfo>& infos);
// Throws InternalError unless encode() produced `text` from a valid info: every info has one
// canonical text.
RankInfo decode_rank_info(const std::string& text);

}  // namespace pycomm::bootstrap
