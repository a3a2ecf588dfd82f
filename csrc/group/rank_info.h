// What a rank publishes in the store while a group forms: its process, host and addresses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/choose.h"

namespace pycomm {

// Where choices turn for ranks that reach each other by a transport, as measured.
struct TunedThresholds {
  std::string transport;
  Thresholds thresholds;
};

struct RankInfo {
  std::string process;  // equal for ranks that are threads of one process
  std::string host_id;  // equal for ranks of one host and network namespace
  std::string host;     // its name, for people
  int64_t pid = 0;
  std::string pid_space;  // equal where one's process ids mean the same to the other
  std::string options;
  std::string token;     // rank 0's: unique to the group
  std::string shm, tcp;  // addresses; empty: not to be had
  std::string memory;    // bytes that it lays out for the ranks of its host, in digits
  std::string heap;      // bytes of its heap, in digits; "0": none
  std::vector<TunedThresholds> tuned{};  // rank 0's holds for all
};

// `host`: as ConnectOptions has it.
RankInfo own_rank_info(const std::string& host);
// Whether they reach each other as ranks of one host do, whichever hosts they are said to be of.
bool on_one_machine(const RankInfo& a, const RankInfo& b);
std::string encode(const RankInfo& info);
// What tells a group's connections from those of every other group. No two pairs give the same.
std::string context_of(const RankInfo& first, const std::string& name);
// A digest of all rank infos, by rank: shows whether two ranks read the same.
std::string digest_of(const std::vector<RankInfo>& infos);
// Throws InternalError on anything that encode() did not make of a valid info: every info has one
// canonical text.
RankInfo decode_rank_info(const std::string& text);

}  // namespace pycomm
