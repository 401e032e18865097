// Not C++, and it says so in its first error.
int hr_run( { return undeclared_word; }
