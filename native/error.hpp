// One exception for the whole core. bindings.cpp turns its kind into a class of zerostall.errors.
#pragma once
#include <stdexcept>
#include <string>

namespace zs {

enum class Kind { storage, capacity, capability, format, corrupt, device, usage };

struct Error : std::runtime_error {
  Kind kind;
  int code;  // errno where the operating system refused, else 0
  Error(Kind kind_of, const std::string& what, int errno_of = 0)
      : std::runtime_error(what), kind(kind_of), code(errno_of) {}
};

// An Error of that kind whose text ends in the system's words for `errno_of`.
Error system_error(Kind kind, const std::string& what, int errno_of);

}  // namespace zs
