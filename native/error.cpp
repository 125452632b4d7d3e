#include "error.hpp"

#include <system_error>

namespace zs {

Error system_error(Kind kind, const std::string& what, int errno_of) {
  // std::generic_category is safe to use from several threads; strerror is not.
  return Error(kind, what + ": " + std::generic_category().message(errno_of), errno_of);
}

}  // namespace zs
