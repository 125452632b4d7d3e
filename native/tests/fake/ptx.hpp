// As much of PTX as our kernels use, one warp at a time, on the CPU.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake {

// Registers hold a value for each lane. All lanes of a warp must go the same way at a branch.
class Ptx {
 public:
  explicit Ptx(const std::string& text);  // throws std::invalid_argument, naming a line it does not know
  const std::string& entry() const { return entry_; }
  size_t parameters() const { return parameters_.size(); }

  // One block of up to 32 threads. False: it touched memory that is nobody's, and went no further.
  bool run(uint32_t block, uint32_t threads, const std::vector<uint64_t>& arguments) const;

 private:
  struct Operand {
    enum Kind { kNone, kRegister, kNumber, kBlock, kThread, kParameter } kind = kNone;
    size_t index = 0;     // of the register or parameter
    uint64_t number = 0;  // or offset, where it is an address
  };
  struct Instruction {
    std::string verb;  // without types: "ld", "lop3", "setp.gt.and"
    int width = 4;     // bytes
    Operand guard;
    bool guard_inverted = false;
    std::vector<Operand> operands;
    size_t target = 0;  // of a branch
    std::string line;
  };
  Operand operand(std::string word);
  Instruction instruction(std::string line);
  size_t register_named(const std::string& name);

  std::string entry_;
  std::map<std::string, size_t> registers_, parameters_, labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<Instruction> program_;
};

}  // namespace fake
