// The rank info that ranks publish while a group forms, and its addresses.
#include <sys/socket.h>

#include "bootstrap/rank_info.h"
#include "core/errors.h"
#include "fuzz.h"
#include "os/socket.h"

namespace {

using namespace pycomm;

void read_info(const std::string& text) {
  bootstrap::RankInfo info;
  try {
    info = bootstrap::decode_rank_info(text);
  } catch (const InternalError&) {
    return;
  }
  fuzz::demand(bootstrap::encode(info) == text, "rank info has another encoding");
}

void read_address(const std::string& text) {
  try {
    const os::Address address = os::parse_tcp_address(text);
    fuzz::demand(os::parse_tcp_address(address.text()).text() == address.text(),
                 "an address comes back as another");
  } catch (const InvalidArgument&) {
  }
  try {
    const os::Address address = os::abstract_unix_address(text);
    fuzz::demand(address.length <= sizeof address.storage, "an address is longer than its place");
  } catch (const InvalidArgument&) {
  }
}

}  // namespace

void fuzz::one(Input input) {
  const std::string text = text_of(input);
  read_info(text);
  read_info("pycomm-7\n" + text);
  read_address(text);
}
