// Deliberate faults, by which tests show that the conformance kit finds them; see README.md. 0 is no fault.
#pragma once

#ifndef FAULT
#define FAULT 0
#endif

// Only one source file has each fault: the others are compiled once.
static constexpr bool has_fault(int number) { return number == FAULT; }
